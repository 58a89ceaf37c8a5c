"""Merged models against adapted ones in float64, their files, and what is refused."""

import copy
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hard_models
import hard_nets as nets
import kinds
import pytest
import torch
import torch.nn.functional as F
from graphs import randomize
from hard_nets import Conv, Lambda, Norm, same
from small import Residual
from torch import fx, nn

import floorplan
from floorplan.errors import FloorplanError
from floorplan.graph.driver import rewrite
from floorplan.graph.trace import trace
from floorplan.layers.adapter import Adapter, adapters
from floorplan.layers.branch import RankBranch
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.methods.catalogue import METHODS, Options
from floorplan.methods.merge import difference, merge, merge_verified
from floorplan.methods.merge_state import delta_state
from floorplan.methods.verify import randomize_adapters, to_double
from tests.cli.test_main import run
from tests.layers.test_fused import GEOMETRIES

HERE = Path(__file__).parents[1] / "nets"
RESIDUAL = f"{HERE / 'small.py'}:residual"
MERGEABLE = [m.name for m in METHODS.values() if m.merges and m.name not in ("full", "bias", "bn")]
NO_SOURCE = ("memflora-noscale",)  # the scale that its source would need is gone
X = torch.randn(2, 3, 12, 12)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small models run no faster on several, and far slower where others hold them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapted(
    model: nn.Module, *inputs: Any, method: str = "memflora", sites: str = "all", rank: int = 2
) -> fx.GraphModule:
    """Rewritten by a method, its adapters drawn; in eval mode."""
    gm = trace(model, inputs, both_modes=True).gm
    passes = METHODS[method].passes(Options(rank, sites))
    gm, _ = rewrite(gm, passes, lambda p, before, after: None)
    randomize_adapters(gm, 0.3)
    gm.meta["floorplan"] = {"method": method, "input": [list(t.shape) for t in inputs]}
    return gm.eval()


def moved(gm: fx.GraphModule, model: nn.Module, inputs: Any) -> bool:
    """Whether the adapters change the output at all: else a comparison says nothing."""
    return difference(copy.deepcopy(gm), copy.deepcopy(model).eval(), inputs) > 1e-3


def check(model: nn.Module, *inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Merge, compare in float64, and look for what is not torch's own; (adapted, merged)."""
    model, inputs = randomize(model).double(), to_double(inputs)
    gm = adapted(model, *inputs, **options)
    assert moved(gm, model, inputs)
    before = {k: t.clone() for k, t in gm.state_dict().items()}
    merged = merge(gm)
    assert difference(gm, merged, inputs) <= 1e-12
    assert all(torch.equal(t, before[k]) for k, t in gm.state_dict().items())
    foreign = {type(m).__name__ for m in merged.modules() if type(m).__module__[:9] == "floorplan"}
    assert foreign <= {"AnyBatchNorm", "TrainingFlag"}
    return gm, merged


def into_source(model: nn.Module, gm: fx.GraphModule, *inputs: Any) -> float:
    """Difference of the source with the adapters in its state_dict."""
    state = delta_state(gm, model)
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    assert not any(t.requires_grad for t in state.values())
    return difference(gm, twin, to_double(inputs))


def kinds_in(gm: fx.GraphModule) -> list[str]:
    """What the nodes call, in order."""
    nodes = [n for n in gm.graph.nodes if n.op in ("call_module", "call_function")]
    layers = [gm.get_submodule(n.target) if n.op == "call_module" else None for n in nodes]
    return [n.target.__name__ if m is None else type(m).__name__ for n, m in zip(nodes, layers, strict=True)]


@pytest.mark.parametrize("conv,shape", GEOMETRIES, ids=lambda v: str(v))
def test_every_geometry(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    nd = len(shape) - 1
    bn = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][nd - 1](conv.out_channels)
    x = torch.randn(3, *shape)
    for act in (nn.ReLU6(), nn.LeakyReLU(0.2, inplace=True)):
        model = nn.Sequential(copy.deepcopy(conv), copy.deepcopy(bn), act)
        gm, merged = check(model, x, rank=1)
        assert into_source(model, gm, x) <= 1e-12
        pads = conv.padding == "same" and any(
            d * (k - 1) % 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)
        )
        names = ["pad"] * pads + [type(conv).__name__, type(act).__name__]
        assert kinds_in(merged) == names
        new: Any = merged.get_submodule("0")
        if not pads and conv.padding == "same":
            assert new.padding_mode == conv.padding_mode
        assert (new.stride, new.dilation, new.groups) == (conv.stride, conv.dilation, conv.groups)
        assert not any(getattr(m, "inplace", False) for m in merged.modules())
    unbatched = check(copy.deepcopy(conv), x, rank=1)[1]
    assert difference(adapted(conv.double(), x.double(), rank=1), unbatched, (x[0].double(),)) <= 1e-12


ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU6(True),
    nn.Hardtanh(-0.5, 1.5),
    nn.LeakyReLU(-0.5),
    nn.Threshold(0.2, -3.0),
    nn.Hardsigmoid(),
    nn.Hardshrink(0.3),
    nn.Softshrink(0.2),
    nn.PReLU(6),
    nn.RReLU(0.1, 0.3),
    nn.SiLU(),
]


@pytest.mark.parametrize("method", ["memflora", "memflora-paper"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: type(a).__name__)
def test_every_activation_comes_back(act: nn.Module, method: str) -> None:
    if isinstance(act, nn.PReLU):
        act.weight.data.uniform_(0.1, 0.9)
    model = nn.Sequential(same(3, 6), Norm(6), copy.deepcopy(act), Conv(6, 4, 1), Norm(4))
    gm, merged = check(model, X, method=method)
    assert kinds_in(merged) == ["Conv2d", type(act).__name__, "Conv2d"]
    new = next(m for m in merged.modules() if type(m) is type(act))
    want: Any = copy.deepcopy(act)
    if hasattr(want, "inplace"):
        want.inplace = False
    assert repr(new) == repr(want)
    assert into_source(model, gm, X) <= 1e-12


POOLS = [
    (nn.MaxPool1d(3, 2, 1, ceil_mode=True), 1),
    (nn.MaxPool2d((3, 2), dilation=(2, 1)), 2),
    (nn.MaxPool3d(2), 3),
    (nn.AvgPool1d(3, 2, 1, count_include_pad=False), 1),
    (nn.AvgPool2d(3, 2, 1, divisor_override=5), 2),
    (nn.AvgPool3d(2, ceil_mode=True), 3),
    (nn.AdaptiveAvgPool1d(3), 1),
    (nn.AdaptiveAvgPool2d((None, 5)), 2),
    (nn.AdaptiveAvgPool3d(1), 3),
    (nn.Dropout(0.3), 2),
    (nn.Dropout1d(0.3), 1),
    (nn.Dropout2d(0.3), 2),
    (nn.Dropout3d(0.3), 3),
]


@pytest.mark.parametrize("layer,dims", POOLS, ids=str)
def test_every_compact_layer_comes_back(layer: nn.Module, dims: int) -> None:
    conv: Any = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    model = nn.Sequential(conv(3, 6, 3, padding=1), layer, conv(6, 4, 1))
    x = torch.randn(2, 3, *[9, 8, 7][:dims])
    merged = check(model, x)[1]
    new = merged.get_submodule("1")
    assert type(new) is type(layer)
    outputs = []
    for m in (layer, new):
        torch.manual_seed(1)
        outputs.append(m.train()(torch.randn(2, 6, *[9, 8, 7][:dims])))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("method", MERGEABLE)
def test_every_method(method: str) -> None:
    model = Residual()
    gm, merged = check(model, X, method=method)
    assert not [m for m in merged.modules() if isinstance(m, Adapter)]
    assert all(p.requires_grad for p in merged.parameters()) and not merged.training
    if method in NO_SOURCE:
        with pytest.raises(FloorplanError, match="none fits memflora-noscale"):
            delta_state(gm, model)
    else:
        assert into_source(model, gm, X) <= 1e-12
    single = adapted(Residual(), X, method=method)
    found = merge_verified(single, (X,))
    assert found.exact is not None and found.exact <= 1e-12 and 0 < found.rounded <= 1e-5
    assert found.convs == len(adapters(single)) > 0


@pytest.mark.parametrize("method", MERGEABLE)
def test_every_method_on_other_shapes(method: str) -> None:
    grouped = nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)),
        Conv(3, 8, 3, 2),
        Norm(8),
        nn.ReLU(),
        Norm(8),
        Conv(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        Conv(8, 8, 3, groups=8),
        Conv(8, 4, 1, bias=False),
        Norm(4),
        Conv(4, 4, 2, padding="same"),
    )
    gm = check(grouped, X, method=method, sites="ungrouped")[0]
    if method not in NO_SOURCE:
        assert into_source(grouped, gm, X) <= 1e-12
    sensors = nets.sensors()
    gm = check(sensors, torch.randn(2, 9, 128), method=method)[0]
    if method not in NO_SOURCE:
        assert into_source(sensors, gm, torch.randn(2, 9, 128)) <= 1e-12


WHOLE = [
    "one-conv-in-a-loop",
    "grouped-deconv",
    "depthwise",
    "zero-and-negative-variance",
    "in-place-add-after-relu",
    "training-flag",
    "handwritten-frozen-norm",
]


@pytest.mark.parametrize("name", WHOLE)
def test_hard_models(name: str) -> None:
    hard = hard_models.HARD[name]
    model: Any = hard.build()
    x = torch.randn(*hard.input)
    if name == "zero-and-negative-variance":
        model.b2.running_var[2] = 0.5  # -eps gives infinity: nothing could be compared
    state = {k: t.clone() for k, t in model.state_dict().items()}
    model = model.double()
    gm = adapted(model, x.double(), rank=1)
    assert difference(gm, merge(gm), (x.double(),)) <= 1e-12 and set(state) == set(model.state_dict())
    if name != "handwritten-frozen-norm":
        assert into_source(model, gm, x) <= 1e-12


@pytest.mark.parametrize(
    "name",
    [
        "relu6",
        "hardtanh",
        "pad-with-a-value",
        "two-norms-one-conv",
        "add-to-a-view",
        "no-affine",
        "nested-output",
        "dataclass-output",
        "several-inputs",
        "one-channel-dropout",
        "deconv-3d",
        "one-position",
        "squeeze-excite",
        "weight-norm",
        "group-norm",
    ],
)
def test_kinds(name: str) -> None:
    model, inputs = (kinds.FLOOR | kinds.ABOVE)[name]()
    gm = check(model, *inputs)[0]
    assert into_source(model, gm, *inputs) <= 1e-12


def test_the_residual_add_and_the_activation_are_nodes() -> None:
    model = Lambda(lambda m, x: F.relu(m.b(m.c(x)) + m.skip(x)), c=same(3, 6), b=Norm(6), skip=Conv(3, 6, 1))
    gm, merged = check(model, X)
    assert [type(m) for m in gm.children()] == [FusedConv, FusedConv]
    assert kinds_in(merged) == ["Conv2d", "Conv2d", "add", "ReLU"]
    kept = merged.meta["floorplan"]
    assert kept == {"merged": True, "method": "memflora", "input": [[2, 3, 12, 12]]}
    assert gm.meta["floorplan"] == {k: v for k, v in kept.items() if k != "merged"}


def test_calls_of_one_conv_stay_calls_of_one_conv() -> None:
    looped = Lambda(nets.looped, conv=same(8, 8))
    x = torch.randn(2, 8, 6, 6)
    for method in ("memflora", "memflora-kernel-down"):
        gm, merged = check(looped, x, method=method)
        convs = [n.target for n in merged.graph.nodes if "Conv" in str(n.target) or n.target == "conv"]
        assert convs == ["conv"] * 5 and len(list(merged.parameters())) == 2
        assert into_source(looped, gm, x) <= 1e-12
    single = adapted(Lambda(nets.looped, conv=same(8, 8)), x)
    assert len(list(merge_verified(single, (x,)).module.parameters())) == 2


def test_calls_of_one_conv_with_other_paddings_share_its_weight() -> None:
    model = Lambda(lambda m, x: m.c(F.pad(x, (1, 2, 1, 1))).mean() + m.c(x), c=Conv(3, 6, 3))
    merged = check(model, X)[1]
    convs = [m for m in merged.modules() if isinstance(m, Conv)]
    assert len(convs) == 2 and convs[0].weight is convs[1].weight and convs[0].bias is convs[1].bias


def test_a_scale_and_shift_is_a_batch_norm_that_train_does_not_change() -> None:
    for nd, norm in enumerate((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 1):
        conv: Any = [nn.Conv1d, nn.Conv2d, nn.Conv3d][nd - 1]
        model = nn.Sequential(norm(3), conv(3, 6, 1))
        x = torch.randn(2, 3, *[4] * nd)
        for method in ("memflora", "memflora-paper"):
            model.add_module("2", norm(6))
            merged = check(model, x, method=method)[1]
            assert kinds_in(merged) == ["batch_norm", "Conv" + f"{nd}d"]
            outputs = [merged.train(mode)(x.double()) for mode in (True, False)]
            assert torch.equal(*outputs)


def test_a_clamp_is_torch_clamp() -> None:
    merged = check(Lambda(lambda m, x: m.c(x).clamp(-0.1, 0.2), c=same(3, 6)), X)[1]
    assert kinds_in(merged) == ["Conv2d", "clamp"]


def test_channels_last_and_half_precision_stay() -> None:
    model: Any = nn.Sequential(same(3, 8), Norm(8), nn.ReLU(), same(8, 8))
    last = model.to(memory_format=torch.channels_last)
    merged = merge(adapted(last, X))
    assert all(
        m.weight.is_contiguous(memory_format=torch.channels_last) for m in merged.modules() if isinstance(m, Conv)
    )
    half = copy.deepcopy(model).bfloat16()
    found = merge_verified(adapted(half, X.bfloat16()), (X.bfloat16(),))
    assert {p.dtype for p in found.module.parameters()} == {torch.bfloat16}


def test_a_fault_in_a_merged_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = adapted(Residual(), X)
    value = FusedConv.value
    monkeypatch.setattr(FusedConv, "value", lambda site, x, w: value(site, x, w * 1.001))
    with pytest.raises(FloorplanError, match="outputs differ by"):
        merge_verified(gm, (X,))


def test_what_trained_outside_the_sites_goes_into_the_state_dict() -> None:
    model = randomize(Residual()).double()
    gm = adapted(model, X.double(), method="lora-conv")
    head: Any = gm.get_submodule("fc")
    with torch.no_grad():
        head.weight.add_(1.0)
    gm.train()(X.double())  # the BatchNorms gather statistics
    assert into_source(model, gm.eval(), X) <= 1e-12
    head.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(FloorplanError, match="fc.extra trains, but the source has no such tensor"):
        delta_state(gm, model)


def test_adapters_of_convs_that_share_a_weight_do_not_fit_one_state_dict() -> None:
    model = nn.Sequential(Conv(4, 4, 1), Conv(4, 4, 1))
    model[1].weight = model[0].weight
    x = torch.randn(2, 4, 5, 5)
    gm = check(model, x)[0]
    with pytest.raises(FloorplanError, match="0 and 1 share one weight"):
        delta_state(gm, model)


def test_a_source_of_other_shapes_is_refused() -> None:
    gm = adapted(Residual(), X)
    with pytest.raises(FloorplanError, match="the source has no stem.weight of shape"):
        delta_state(gm, Residual(16))


@pytest.mark.parametrize("method", ["zero-shot", "full", "bias", "bn"])
def test_methods_without_adapters_are_plain_already(method: str) -> None:
    gm = adapted(Residual(), X, method=method)
    with pytest.raises(FloorplanError, match=f"method {method}: is plain already: nothing to merge"):
        merge(gm)


def test_other_refusals_name_layer_and_method() -> None:
    with pytest.raises(FloorplanError, match="Residual is no adapted graph"):
        merge(Residual())  # type: ignore[arg-type]
    gm = adapted(Residual(), X, method="memflora-bnr")
    with pytest.raises(
        FloorplanError, match="memflora-bnr: stem_branch is a RankBranch, which has a BatchNorm of q that"
    ):
        merge(gm)

    class Unknown(Adapter):
        rank = 2

    gm = adapted(Residual(), X)
    gm.add_submodule("odd", Unknown())
    with pytest.raises(FloorplanError, match="method memflora: odd is a Unknown, which has no place"):
        merge(gm)


@pytest.mark.parametrize("method", ["tinytl", "tinytl-trainbn"])
def test_lite_residuals_are_refused(method: str) -> None:
    if method not in METHODS:
        pytest.skip("not a method here")
    block = nn.Sequential(same(8, 8), Norm(8), nn.ReLU(), same(8, 8), Norm(8))
    gm = adapted(nn.Sequential(same(3, 8), block), X, method=method)
    with pytest.raises(FloorplanError, match=f"method {method}: .* is a LiteResidual"):
        merge(gm)


def branched(add: Any = operator.add, swap: bool = False, read: bool = False) -> fx.GraphModule:
    """A conv and a branch beside it, by hand."""
    torch.manual_seed(0)
    conv = same(3, 6).double()
    geo = geometry_of(conv).config()
    root = nn.Module()
    root.conv, root.branch = conv, RankBranch(geo, [6, 3, 3, 3], 2, "up", "none").double()
    nn.init.normal_(root.branch.U)
    nn.init.normal_(root.branch.P)
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = (graph.call_module("conv", (x,)), graph.call_module("branch", (x,)))
    out = graph.call_function(add, parts[::-1] if swap else parts)
    graph.output((out, parts[0]) if read else out)
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("add", [operator.add, operator.iadd])
def test_a_branch_added_by_a_node(add: Any, swap: bool) -> None:
    gm = branched(add, swap)
    merged = merge(gm)
    assert kinds_in(merged) == ["Conv2d"]
    assert difference(gm, merged, (X.double(),)) <= 1e-12


def test_a_branch_without_a_conv_of_its_own_is_refused() -> None:
    with pytest.raises(FloorplanError, match="branch .RankBranch.: conv has another reader"):
        merge(branched(read=True))
    with pytest.raises(FloorplanError, match="branch .RankBranch.: nothing adds it to a conv"):
        merge(branched(operator.mul))


def saved(path: Path, method: str = "memflora") -> fx.GraphModule:
    gm = adapted(randomize(Residual()), X, method=method)
    floorplan.save(gm, path)
    return gm


def test_merge_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gm = saved(tmp_path / "adapted.pt")
    where = tmp_path / "merged.pt"
    code, out, err = run(capsys, "merge", str(tmp_path / "adapted.pt"), "-o", str(where))
    assert code == 0 and not err and len(out.splitlines()) == 1
    assert f"wrote {where}: 3 convs merged, largest relative difference" in out and "in float64" in out
    again = floorplan.load(where)
    assert difference(gm, again, (X,)) <= 1e-5 and not adapters(again)
    assert again.meta["floorplan"] == {"merged": True, "method": "memflora", "input": [[2, 3, 12, 12]]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapted.pt", "merged.pt"]
    assert floorplan.check(str(where)).exit_code == 1
    code, _, err = run(capsys, "merge", str(where), "-o", str(where))
    assert code == 2 and "exists already" in err
    code, _, err = run(capsys, "merge", str(where), "-o", str(where), "--force")
    assert code == 2 and "method memflora: is plain already: nothing to merge" in err
    second = floorplan.rewrite(floorplan.load(where), X, measured=False)
    assert len(adapters(second.module)) == 3


def test_merge_into_a_source_writes_its_state_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gm = adapted(Residual(), X)
    floorplan.save(gm, tmp_path / "adapted.pt")
    where = tmp_path / "weights.pt"
    command = ("merge", str(tmp_path / "adapted.pt"), "-o", str(where), "--into")
    code, out, err = run(capsys, *command, RESIDUAL)
    assert code == 0 and not err and "3 convs merged into a state_dict of" in out
    state = torch.load(where, weights_only=True)
    model = Residual()
    model.load_state_dict(state)
    assert difference(gm, model, (X,)) <= 1e-5
    other = {k: t + 1 if t.is_floating_point() else t for k, t in Residual().state_dict().items()}
    torch.save(other, tmp_path / "other.pt")
    options = ("--force", "--weights", str(tmp_path / "other.pt"))
    before = where.read_bytes()
    code, _, err = run(capsys, *command, RESIDUAL, *options)
    assert code == 2 and len(err.splitlines()) == 1 and "name the model, and the weights" in err
    code, _, err = run(capsys, *command, f"{HERE / 'small.py'}:smooth", "--force")
    assert code == 2 and "the source has no stem.weight" in err
    assert where.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapted.pt", "other.pt", "weights.pt"]


def test_merge_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "full.pt", "full")
    torch.save(Residual(), tmp_path / "source.pt")
    for arguments, words in (
        (("full.pt",), "method full: is plain already: nothing to merge"),
        (("none.pt",), "none.pt"),
        (("source.pt",), "source.pt"),
        (("full.pt", "--weights", "x.pt"), "belong to --into"),
    ):
        first = str(tmp_path / arguments[0])
        code, out, err = run(capsys, "merge", first, "-o", str(tmp_path / "out.pt"), *arguments[1:])
        assert code == 2 and not out and len(err.splitlines()) == 1 and words in err
        assert not (tmp_path / "out.pt").exists()
