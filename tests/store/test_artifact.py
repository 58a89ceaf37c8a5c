"""adapted.pt: what goes in comes out, what is not data stays out, half a file never appears."""

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from floorplan.errors import FloorplanError
from floorplan.layers.activations import PackedActivation
from floorplan.layers.average_pools import ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.layers.dropout import PackedDropout
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.max_pools import PackedMaxPool
from floorplan.layers.plain import AnyBatchNorm, Clamp, TrainingFlag
from floorplan.store.artifact import decode, encode, load_artifact, save_artifact
from floorplan.store.graphs import Reader
from floorplan.store.modules import build, encode_module, own_classes


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.skip = nn.Conv2d(3, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += self.skip(x)
        return F.relu6(y, inplace=True)


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 3, padding="same"), kind

    def forward(self, x: Tensor) -> Any:
        p, q = self.a(x), torch.cat([self.b(x), x], dim=1)
        return {"tuple": (p, [q, (p,)]), "dict": {"p": p, "q": (q, None)}, "list": [p, q]}[self.kind]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.first
        self.other = nn.Conv2d(3, 3, 3, padding=1)
        self.other.weight = self.first.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.again(self.first(x)))
        return F.conv2d(y, self.again.weight, padding=1)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, 2.0, 0.5]).reshape(3, 1, 1))
        self.register_buffer("shift", torch.ones(3, 1, 1), persistent=False)
        self.register_buffer("kept", torch.full((1,), 0.25))
        self.bare = torch.tensor(0.125)

    def forward(self, x: Tensor) -> Tensor:
        shift, kept = self.get_buffer("shift"), self.get_buffer("kept")
        return x * self.scale + shift - kept + self.bare


class Methods(nn.Module):
    def forward(self, x: Tensor, gain: float = 2.0, *, flip: bool = False) -> Tensor:
        y = x.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, x.shape[1])
        y = y[:, 1:-1:2, ..., None].squeeze(-1)[:, :, (0, 2)].mul_(gain)
        y = y.to(torch.float64).clamp(min=-float("inf"), max=float("inf")).sum(-1, dtype=x.dtype)
        z = torch.zeros(y.shape, dtype=torch.float32, device=x.device) + y.new_ones(1)
        return -(y @ z.transpose(0, 1)).contiguous(memory_format=torch.contiguous_format) / 3


class Functions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.pad(F.max_pool2d(F.silu(x), 2), (0, 1, 1, 0), value=0.5)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        z = torch.softmax(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1), dim=1, dtype=torch.float64)
        v = torch.einsum("bc,bd->cd", z, z).abs() ** 0.5
        low, high = torch.chunk(F.hardswish(x), 2, dim=2)
        return (torch.stack([v, v]), low * high, F.leaky_relu(x, 0.2), F.dropout(x, 0.0, self.training))


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm2d(3)
        self.live = nn.BatchNorm2d(3, momentum=None)
        self.act = nn.PReLU(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.live(self.frozen(x)))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
        self.norm = nn.LayerNorm([8], bias=False)
        self.head = nn.Sequential(nn.GroupNorm(2, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x.flatten(2).transpose(1, 2))[0]
        y = self.norm(self.attention(y, y, y)[0] + y)
        z: Tensor = self.head(y.mean(1))
        return z


ZOO: dict[str, Any] = {
    "residual": Residual,
    "tuple": lambda: Outputs("tuple"),
    "dict": lambda: Outputs("dict"),
    "list": lambda: Outputs("list"),
    "shared": Shared,
    "constants": Constants,
    "methods": Methods,
    "functions": Functions,
    "modes": Modes,
    "recurrent": Recurrent,
}


def image(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def traced(name: str) -> fx.GraphModule:
    torch.manual_seed(0)
    gm = fx.symbolic_trace(ZOO[name]())
    for node in gm.graph.nodes:
        node.type = None  # annotations are not stored
    gm.recompile()
    if name == "modes":
        gm.get_submodule("frozen").eval()
        gm.get_parameter("frozen.weight").requires_grad_(False)
    return gm


def round_trip(gm: fx.GraphModule, folder: Path, meta: dict[str, Any] | None = None) -> Any:
    save_artifact(gm, folder / "adapted.pt", meta or {})
    return load_artifact(folder / "adapted.pt")


def flat(out: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]


def step(gm: fx.GraphModule) -> tuple[Any, dict[str, Tensor | None], Tensor]:
    """One training step: outputs, parameter gradients, input gradient."""
    x = image().requires_grad_()
    gm.zero_grad(set_to_none=True)
    out = gm(x)
    torch.stack([t.double().square().sum() for t in flat(out)]).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return out, {n: p.grad for n, p in gm.named_parameters()}, x.grad


def same(a: Any, b: Any) -> None:
    """Equal structure (types and keys) and equal bits."""
    assert torch.utils._pytree.tree_structure(a) == torch.utils._pytree.tree_structure(b)
    for s, t in zip(flat(a), flat(b), strict=True):
        assert s.dtype == t.dtype and torch.equal(s, t)


@pytest.mark.parametrize("name", ZOO)
def test_round_trip(name: str, tmp_path: Path) -> None:
    gm = traced(name)
    back = round_trip(gm, tmp_path)
    assert back.code == gm.code
    assert [n.name for n in back.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert list(back.state_dict()) == list(gm.state_dict())
    assert [n for n, _ in back.named_buffers()] == [n for n, _ in gm.named_buffers()]
    flags = [{n: m.training for n, m in g.named_modules()} for g in (gm, back)]
    assert flags[0] == flags[1]
    out, grads, gx = step(gm)
    out2, grads2, gx2 = step(back)
    same(out, out2)
    same(grads, grads2)
    assert torch.equal(gx, gx2)
    same(dict(gm.named_buffers()), dict(back.named_buffers()))  # statistics moved alike


def test_read_without_any_class_admitted(tmp_path: Path) -> None:
    save_artifact(traced("recurrent"), tmp_path / "a.pt", {"rank": 2})
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "a.pt") == []
    document = torch.load(tmp_path / "a.pt", weights_only=True)
    assert document["format"] == "floorplan.adapted/1"
    assert {type(n["target"]) for n in document["graph"]} == {str}


def test_meta_comes_back(tmp_path: Path) -> None:
    meta = {"rank": 2, "sites": ["a", ("b", 1.5)], "none": None, "limit": float("inf")}
    back = round_trip(traced("residual"), tmp_path, meta)
    assert back.meta["floorplan"] == meta | {"sites": ["a", ["b", 1.5]]}
    again = tmp_path / "again.pt"
    save_artifact(back, again, back.meta["floorplan"])
    assert load_artifact(again).code == back.code


def test_plan_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FloorplanError, match="the plan is not JSON"):
        save_artifact(traced("residual"), tmp_path / "a.pt", {"x": image()})
    assert os.listdir(tmp_path) == []


def test_ordered_dict_output(tmp_path: Path) -> None:
    gm = traced("dict")
    output = next(n for n in gm.graph.nodes if n.op == "output")
    value: Any = output.args[0]
    with gm.graph.inserting_before(output):
        pairs = [("q", value["q"][0]), ("p", value["p"])]
        made = gm.graph.call_function(collections.OrderedDict, (pairs,))
    output.args = (made,)
    gm.recompile()
    out = round_trip(gm, tmp_path)(image())
    assert type(out) is collections.OrderedDict and list(out) == ["q", "p"]


def test_sharing_and_ties_survive(tmp_path: Path) -> None:
    gm = traced("shared")
    gm.add_module("again", gm.get_submodule("first"))
    second = [n for n in gm.graph.nodes if n.target == "first"][1]
    second.target = "again"
    read = next(n for n in gm.graph.nodes if n.op == "get_attr")
    read.target = "again.weight"
    gm.recompile()
    back = round_trip(gm, tmp_path)
    assert back.code == gm.code and "again.weight" in back.code
    same(back(image()), gm(image()))
    assert list(back.state_dict()) == list(gm.state_dict())
    assert back.again is back.first
    assert back.other.weight is back.first.weight
    assert len(list(back.parameters())) == 3


def test_kinds_of_tensor_survive(tmp_path: Path) -> None:
    gm = traced("constants")
    shift = gm.get_buffer("shift")
    del gm.shift
    gm.register_buffer("shift", shift, persistent=False)
    back = round_trip(gm, tmp_path)
    assert list(back.state_dict()) == list(gm.state_dict())
    assert [n for n, _ in back.named_parameters()] == ["scale"]
    assert "shift" in dict(back.named_buffers()) and "shift" not in back.state_dict()


def test_bare_constant_survives(tmp_path: Path) -> None:
    gm = traced("residual")
    object.__setattr__(gm, "bare", torch.tensor(0.5))
    relu = next(n for n in gm.graph.nodes if n.target is F.relu6)
    with gm.graph.inserting_before(relu):
        bare = gm.graph.create_node("get_attr", "bare")
        relu.args = (gm.graph.call_function(torch.mul, (relu.args[0], bare)),)
    gm.recompile()
    assert "bare" not in dict(gm.named_buffers())
    back = round_trip(gm, tmp_path)
    assert "bare" in vars(back)
    same(gm(image()), back(image()))


def test_requires_grad_dtype_and_strides_survive(tmp_path: Path) -> None:
    gm = traced("residual").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    gm.skip.to(torch.bfloat16)
    gm.body.get_submodule("1").double()
    gm.get_parameter("body.0.weight").requires_grad_(False)
    back = round_trip(gm, tmp_path)
    for name, t in gm.state_dict(keep_vars=True).items():
        found = back.state_dict(keep_vars=True)[name]
        assert (found.dtype, found.stride()) == (t.dtype, t.stride())
        assert found.requires_grad == t.requires_grad
        assert torch.equal(found, t)


def test_loading_leaves_the_random_state(tmp_path: Path) -> None:
    save_artifact(traced("recurrent"), tmp_path / "a.pt", {})
    state = torch.get_rng_state()
    load_artifact(tmp_path / "a.pt")
    assert torch.equal(state, torch.get_rng_state())


def test_map_location(tmp_path: Path) -> None:
    save_artifact(traced("residual"), tmp_path / "a.pt", {})
    back = load_artifact(tmp_path / "a.pt", "cpu")
    assert {p.device.type for p in back.parameters()} == {"cpu"}


def test_aten_overloads_round_trip() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, x), {"alpha": 2})
    graph.output(graph.call_function(torch.ops.aten._softmax.default, (y, 1, False)))
    gm = fx.GraphModule(nn.Module(), graph)
    back = decode(encode(gm))
    assert [n.target for n in back.graph.nodes] == [n.target for n in gm.graph.nodes]
    same(gm(image()), back(image()))


MODULES: list[nn.Module] = [
    nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="circular"),
    nn.Conv3d(2, 2, 3, padding="same", bias=False),
    nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1, dilation=2),
    nn.BatchNorm1d(3, eps=1e-3, affine=False),
    nn.BatchNorm3d(3, track_running_stats=False, momentum=None),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    nn.GroupNorm(2, 4, affine=False),
    nn.LayerNorm((3, 4), elementwise_affine=False),
    nn.RMSNorm(4),
    nn.LocalResponseNorm(2),
    nn.Linear(3, 2, bias=False),
    nn.Bilinear(2, 3, 4),
    nn.Identity(),
    nn.Embedding(5, 3, padding_idx=1, max_norm=1.0),
    nn.EmbeddingBag(5, 3, mode="max", padding_idx=2),
    nn.MaxPool2d(3, 2, 1, dilation=2, return_indices=True, ceil_mode=True),
    nn.AvgPool2d(2, count_include_pad=False, divisor_override=3),
    nn.AdaptiveAvgPool2d((None, 2)),
    nn.AdaptiveMaxPool1d(2),
    nn.LPPool2d(2.0, 3),
    nn.MaxUnpool2d(2),
    nn.ReflectionPad2d((1, 2, 0, 1)),
    nn.ConstantPad1d(2, 0.5),
    nn.ZeroPad2d(1),
    nn.Hardtanh(-2.0, 3.0, True),
    nn.ReLU6(True),
    nn.LeakyReLU(0.3),
    nn.ELU(0.5),
    nn.RReLU(),
    nn.Threshold(0.1, 20.0),
    nn.Softplus(2.0),
    nn.GELU("tanh"),
    nn.GLU(1),
    nn.Softmax(1),
    nn.Hardswish(True),
    nn.PReLU(2, 0.1),
    nn.Dropout2d(0.3, True),
    nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True),
    nn.UpsamplingNearest2d((4, 4)),
    nn.PixelShuffle(2),
    nn.ChannelShuffle(2),
    nn.Flatten(1, 2),
    nn.Unflatten(1, (2, 3)),
    nn.Unfold(3, padding=1),
    nn.CosineSimilarity(0),
    nn.PairwiseDistance(3.0),
    nn.LSTM(3, 4, 2, bias=False, dropout=0.1, proj_size=2),
    nn.GRU(3, 4, bidirectional=True),
    nn.RNN(3, 4, nonlinearity="relu"),
    nn.GRUCell(3, 4),
    nn.MultiheadAttention(4, 2, 0.1, bias=False, kdim=3, vdim=5, add_zero_attn=True),
    nn.SyncBatchNorm(3),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_torch_module_configurations(module: nn.Module) -> None:
    name, config = encode_module(module, "module m")
    rebuilt = build(name, config, Reader(), "module m")
    assert type(rebuilt) is type(module)
    assert repr(rebuilt) == repr(module)
    assert all(t.is_meta for t in (*rebuilt.parameters(), *rebuilt.buffers()))


def adapted(scale: bool = True) -> nn.Module:
    """A fused 3x3 site with a rank-2 adapter that does something, and a two-sided gate."""
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    site = FusedConv(geometry_of(conv).config(), [4, 3, 3, 3], scale=scale, act={"name": "ReLU6", "options": {}})
    site.adapt(2, torch.Generator().manual_seed(0))
    for t in (site.get_buffer("weight"), site.get_parameter("U").data):
        nn.init.normal_(t)
    return site


OWN: dict[str, Callable[[], nn.Module]] = {
    "FusedConv": adapted,
    "ChannelAffine": lambda: ChannelAffine(3),
    "PackedActivation": lambda: PackedActivation("LeakyReLU", {"negative_slope": 0.2}),
    "PackedDropout": lambda: PackedDropout("Dropout2d", 0.5),
    "PackedMaxPool": lambda: PackedMaxPool([2, 2], [2, 2], [0, 0], [1, 1]),
    "ShapeAvgPool": lambda: ShapeAvgPool([2, 2], [2, 2], [0, 0]),
    "ShapeAdaptiveAvgPool": lambda: ShapeAdaptiveAvgPool([1, None]),
    "Clamp": lambda: Clamp(0.0, 6.0),
    "AnyBatchNorm": lambda: AnyBatchNorm(3, eps=1e-3),
    "LossyActivation": lambda: LossyActivation("GELU", 2, {"approximate": "tanh"}, fit="minimax"),
}
# Layers of methods come and go by files in test_methods.
OF_METHODS = {
    "FactorConv",
    "FrozenConv",
    "LiteResidual",
    "LoraC",
    "LoraCOfficial",
    "PaperSite",
    "RankBranch",
    "SideConv",
    "TinySite",
}
OF_REMAT = {"Forgetful", "Keep", "Promise"}  # by files in test_remat
NO_TENSOR = {"TrainingFlag"}  # gives a flag, see test_a_training_flag_survives


def test_every_own_class_is_covered() -> None:
    tested = {*OWN, *NO_TENSOR, *OF_METHODS, *OF_REMAT}
    assert {name.rpartition(".")[2] for name in own_classes()} == tested


def test_a_training_flag_survives(tmp_path: Path) -> None:
    graph = fx.Graph()
    x, flag = graph.placeholder("x"), graph.call_module("leaf")
    graph.output(graph.call_function(torch.nn.functional.dropout, (x, 0.5, flag)))
    back = round_trip(fx.GraphModule({"leaf": TrainingFlag()}, graph), tmp_path)
    ones = torch.ones(64)
    assert torch.equal(back.eval()(ones), ones) and not torch.equal(back.train()(ones), ones)


@pytest.mark.parametrize("name", OWN)
def test_own_modules(name: str, tmp_path: Path) -> None:
    gm = with_leaf(OWN[name]())
    back = round_trip(gm, tmp_path)
    assert type(back.leaf) is type(gm.leaf)
    results = []
    for model in (gm, back):
        torch.manual_seed(0)
        results.append(step(model))
    same(results[0], results[1])
    assert list(back.state_dict()) == list(gm.state_dict())


# What is not data is refused by name, and no file appears.


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Pair(NamedTuple):
    a: Any
    b: Any


def helper(x: Tensor) -> Tensor:
    return x


def with_leaf(module: nn.Module) -> fx.GraphModule:
    """A graph that calls one module, `leaf`."""
    graph = fx.Graph()
    graph.output(graph.call_module("leaf", (graph.placeholder("x"),)))
    return fx.GraphModule({"leaf": module}, graph)


def with_function(f: Any, *extra: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(f, (graph.placeholder("x"), *extra)))
    return fx.GraphModule(nn.Module(), graph)


def with_callable() -> fx.GraphModule:
    gm = with_function(torch.cat)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.args = (*node.args, helper)
    return gm


def hooked() -> nn.Module:
    m = nn.ReLU()
    m.register_forward_hook(lambda *a: None)
    return m


def patched(name: str, value: Any) -> nn.Module:
    m = nn.Conv2d(3, 3, 1)
    setattr(m, name, value)
    return m


def parametrized() -> nn.Module:
    m = nn.Conv2d(3, 3, 1)
    parametrize.register_parametrization(m, "weight", nn.Identity())
    return m


def tensor_hook() -> nn.Module:
    m = nn.Conv2d(3, 3, 1)
    m.weight.register_hook(lambda g: g)  # type: ignore[no-untyped-call]
    return m


def exotic(t: Any) -> fx.GraphModule:
    m = with_leaf(nn.ReLU())
    m.register_buffer("t", t)
    return m


REFUSED: dict[str, tuple[Callable[[], fx.GraphModule], str]] = {
    "custom class": (lambda: with_leaf(Custom()), r"module leaf .*Custom\) is not a torch.nn"),
    "hook": (lambda: with_leaf(hooked()), "module leaf: has forward_hooks"),
    "forward": (lambda: with_leaf(patched("forward", helper)), "leaf: its forward was replaced"),
    "method": (lambda: with_leaf(patched("_conv_forward", helper)), "leaf"),
    "stride": (lambda: with_leaf(patched("transposed", True)), "attribute transposed was changed"),
    "parametrized": (lambda: with_leaf(parametrized()), "module leaf: is parametrized"),
    "tensor hook": (lambda: with_leaf(tensor_hook()), "tensor leaf.weight: has a gradient hook"),
    "transformer": (lambda: with_leaf(nn.TransformerEncoderLayer(4, 2)), "module leaf"),
    "function": (lambda: with_function(helper), "graph node helper: calls .*helper, which is not"),
    "eval": (lambda: with_function(eval), "graph node eval_1: calls builtins.eval"),
    "getattr": (lambda: with_function(getattr, "__class__"), "__class__"),
    "namedtuple": (lambda: with_function(torch.cat, Pair(1, 2)), "a .*Pair is not plain data"),
    "callable": (with_callable, "a builtins.function is not plain"),
    "meta": (lambda: exotic(torch.ones(2, device="meta")), "tensor t: not a plain dense"),
    "sparse": (lambda: exotic(torch.eye(2).to_sparse()), "tensor t: not a plain dense"),
    "non-leaf": (lambda: exotic(torch.ones(2).requires_grad_() * 2), "tensor t: not a plain"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_data_is_refused(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(FloorplanError, match=message) as e:
        save_artifact(make(), tmp_path / "a.pt", {})
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == []


def test_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"mine")
    with pytest.raises(FloorplanError, match="already exists"):
        save_artifact(traced("residual"), path, {})
    assert path.read_bytes() == b"mine"
    save_artifact(traced("residual"), path, {}, force=True)
    assert load_artifact(path).code == traced("residual").code
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", ["save", "fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(
    stage: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")

    def fail(*args: Any) -> None:
        if stage == "save":
            args[1].write(b"half of it")
        raise error

    owner: Any = torch if stage == "save" else os
    monkeypatch.setattr(owner, stage, fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FloorplanError
    with pytest.raises(expected):
        save_artifact(traced("residual"), path, {}, force=True)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert path.read_bytes() == b"old"


def test_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FloorplanError, match="cannot be written"):
        save_artifact(traced("residual"), tmp_path / "none" / "a.pt", {})
