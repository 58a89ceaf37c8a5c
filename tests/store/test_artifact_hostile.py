"""A hostile adapted.pt runs nothing, and is refused in one line that names the entry."""

import collections
import copy
import os
import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import floorplan
from floorplan.errors import LoadError
from floorplan.layers.targets import _functions, function_named, methods
from floorplan.store.artifact import decode, encode, load_artifact
from floorplan.store.graphs import Reader
from floorplan.store.modules import torch_classes


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.skip = nn.Conv2d(3, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += self.skip(x)
        return F.relu6(y, inplace=True)


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


class Methods(nn.Module):
    def forward(self, x: Tensor, gain: float = 2.0, *, flip: bool = False) -> Tensor:
        y = x.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, x.shape[1])
        y = y[:, 1:-1:2, ..., None].squeeze(-1)[:, :, (0, 2)].mul_(gain)
        y = y.to(torch.float64).clamp(min=-float("inf"), max=float("inf")).sum(-1, dtype=x.dtype)
        z = torch.zeros(y.shape, dtype=torch.float32, device=x.device) + y.new_ones(1)
        return -(y @ z.transpose(0, 1)).contiguous(memory_format=torch.contiguous_format) / 3


NETS: dict[str, type[nn.Module]] = {"residual": Residual, "shared": Shared, "methods": Methods}


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def document(name: str = "residual") -> dict[str, Any]:
    return encode(fx.symbolic_trace(NETS[name]()))


def call(target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    """A document whose graph makes one call."""
    d = document()
    d["graph"] = [
        {"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}},
        {"op": op, "name": "y", "target": target, "args": list(args), "kwargs": kwargs},
        {"op": "output", "name": "output", "target": "output", "args": [{"node": "y"}], "kwargs": {}},
    ]
    return d


X = {"node": "x"}
FUNCTIONS = """
os.system posix.system torch.load torch.hub.load torch.save torch.classes.load_library
torch.ops.load_library builtins.eval builtins.exec builtins.open builtins.__import__
builtins.setattr operator.methodcaller operator.attrgetter operator.call subprocess.Popen
torch.jit.load torch.autocast torch.from_file torch.ops.aten.from_file.default
torch.ops.aten.save.default torch.ops.aten.warn torch.ops.aten.set_.source_Storage
torch.ops.profiler._record_function_enter torch.nn.functional.F torch.ops.aten.__class__
torch.ops.aten.add.__class__ torch.ops.aten._dir torch.ops torch.ops. torch.ops.aten
torch.utils.cpp_extension.load torch._C._cuda_init torch.fx.wrap floorplan.cli.main relu
torch.relu.__call__ torch.fbgemm_pack_quantized_matrix math.__loader__ collections.namedtuple
""".split()


@pytest.mark.parametrize("target", [*FUNCTIONS, "", "torch.relu\n", "torch.relu; import os"])
def test_hostile_functions(target: str) -> None:
    refused(call(target, X), "y")


METHODS = """
__reduce__ __class__ __init_subclass__ apply_ map_ map2_ backward register_hook numpy set_
share_memory_ data_ptr storage untyped_storage resize_ grad_fn data shape _make_subclass
_backward_hooks module_load as_subclass no_such_method relu.__call__ relu()
""".split()


@pytest.mark.parametrize("target", METHODS)
def test_hostile_methods(target: str) -> None:
    refused(call(target, X, op="call_method"), "y")


@pytest.mark.parametrize(
    "args", [[X, "__class__"], [X, "grad_fn"], [X, "data"], [X], ["text", "shape"], [X, "shape", 0], [X, X]]
)
def test_hostile_attributes(args: list[Any]) -> None:
    assert decode(call("builtins.getattr", X, "shape"))(image()) == image().shape
    refused(call("builtins.getattr", *args), "y")


@pytest.mark.parametrize("op", ["call_module", "get_attr"])
@pytest.mark.parametrize(
    "target",
    [
        "__class__",
        "body.__class__",
        "body.0.__init__",
        "forward",
        "_modules",
        "",
        ".",
        "..",
        "body",
        "../../etc/passwd",
        "/etc/passwd",
        "body.0.forward",
        'body.0", x) or exec("1',
        "skip.weight.data",
        "skip.weight.T",
        "graph",
        "_parameters",
        "training",
        "nowhere",
        "body..0",
    ],
)
def test_hostile_paths(op: str, target: str) -> None:
    refused(call(target, *([X] if op == "call_module" else []), op=op), "y")


INJECTION = "__import__('os').mkdir('/nowhere')"


@pytest.mark.parametrize("text", [INJECTION, "a=1, b", "x\n", "x y", "__class__", "lambda", "torch"])
def test_hostile_names(text: str) -> None:
    d = call("torch.relu", X)
    d["graph"][1]["kwargs"] = {text: 1}
    refused(d, "y")
    for key, record in (("name", 1), ("name", 0), ("target", 0)):
        d = call("torch.relu", X)
        d["graph"][record][key] = text
        refused(d)
    refused(call("torch.relu", X) | {text: 1})


def test_star_arguments_are_allowed_and_checked() -> None:
    d = call("torch.relu", X)
    d["graph"][0]["target"] = "*" + INJECTION
    refused(d)
    d["graph"][0]["target"] = "**x"
    assert "**x" in decode(d).code


CLASSES = """
subprocess.Popen torch.nn.Module torch.nn.Sequential torch.nn.Transformer torch.nn.LazyLinear
torch.nn.modules.module.Module torch.nn.utils.parametrize.ParametrizationList builtins.dict
torch.jit.ScriptModule torch.nn.ReLU.__class__ floorplan.layers.fused.ACTIVATIONS torch.fx.GraphModule
part
""".split()


@pytest.mark.parametrize("name", CLASSES)
def test_hostile_classes(name: str) -> None:
    d = document()
    d["modules"].append({"path": "evil", "class": name, "config": {}, "training": True})
    refused(d, "evil")


def test_process_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a))
    d = document()
    d["modules"].append({"path": "p", "class": "subprocess.Popen", "config": {"args": ["ls"]}, "training": True})
    refused(d, "subprocess.Popen")
    assert started == []


def conv_record(d: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in d["modules"] if m["path"] == "skip")
    return found


@pytest.mark.parametrize(
    "config",
    [
        {"kernel_size": "big"},
        {"kernel_size": 1},
        {"in_channels": -1},
        {"groups": 0},
        {"device": "cpu"},
        {"dtype": {"dtype": "float64"}},
        {"out_channels": 10**12},
        {"padding": {"node": "x"}},
        {"bias": 1},
        {"stride": {"tuple": 3}},
        {"padding_mode": {"nope": 1}},
    ],
)
def test_hostile_configurations(config: dict[str, Any]) -> None:
    d = document()
    conv_record(d)["config"] |= config
    refused(d, "skip")


@pytest.mark.parametrize("damage", ["checksum", "geometry"])
def test_damage_that_shows_only_in_use_is_refused_on_loading(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "adapted.pt"
    source = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    result = floorplan.rewrite(source, torch.randn(2, 3, 8, 8), measured=False)
    floorplan.save(result.module, path)
    if damage == "checksum":
        weight = source[2].weight.detach().numpy().tobytes()
        path.write_bytes(path.read_bytes().replace(weight, weight[:-1] + bytes([weight[-1] ^ 1])))
    else:
        d = torch.load(path, weights_only=True)
        d["meta"]["input"] = [[2, 5, 8, 8]]
        torch.save(d, path)
    says = {"checksum": "does not match its checksum", "geometry": "its graph does not run"}
    with pytest.raises(LoadError, match=says[damage]) as e:
        floorplan.load(path)
    assert "\n" not in str(e.value)


def test_modules_cannot_form_a_cycle() -> None:
    d = document()
    record = {"path": "body.loop", "class": "Module", "config": {}, "training": True}
    for target in ("body", "", "nowhere", "skip.weight", 3, ["body"]):
        bad = copy.copy(d)
        bad["modules"] = [*d["modules"], record | {"shared_with": target}]
        refused(bad, "body.loop")


@pytest.mark.parametrize("path", ["forward", "body", "skip", "skip.extra", "a.b", "__class__", 'a"', ""])
def test_module_places(path: str) -> None:
    d = document()
    d["modules"].append({"path": path, "class": "Module", "config": {}, "training": True})
    refused(d)


def test_hostile_tensors() -> None:
    def changed(key: str, **values: Any) -> dict[str, Any]:
        d = document()
        d[key] = d[key] | values
        return d

    refused(changed("state", **{"skip.weight": torch.ones(4, 3, 2, 2)}), "skip.weight")
    refused(changed("state", **{"skip.weight": torch.ones(4, 3, 1, 1).to_sparse()}), "skip.weight")
    refused(changed("state", **{"skip.weight": [1.0]}), "skip.weight")
    refused(changed("state", extra=torch.ones(1)), "kinds")
    refused(changed("kinds", **{"skip.weight": "constant"}), "skip.weight")
    refused(changed("kinds", **{"skip.weight": "code"}), "skip.weight")
    refused(changed("tied", **{"skip.weight": "body.0.weight"}), "skip.weight")
    d = changed("state", forward=torch.ones(1))
    d["kinds"]["forward"] = "constant"
    refused(d, "forward")
    d = document()
    del d["state"]["skip.weight"], d["kinds"]["skip.weight"]
    d["requires_grad"].remove("skip.weight")
    refused(d, "skip.weight")
    d = document()
    d["requires_grad"].append("body.1.num_batches_tracked")
    refused(d)


def test_values_that_explode_or_nest_are_bounded() -> None:
    wide: list[Any] = [0] * 10
    for _ in range(20):
        wide = [wide] * 10
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(LoadError, match="too large"):
        Reader(left=10_000).value(wide, "y")
    with pytest.raises(LoadError, match="not an encoded value"):
        Reader().value({"a": wide, "b": wide}, "y")
    for value in (deep, loop):
        refused(call("torch.relu", X, value), "y")
        refused(document() | {"meta": {"a": value}}, "meta")


def refused(d: Any, where: str = "") -> None:
    with pytest.raises(LoadError) as e:
        decode(d)
    text = str(e.value)
    assert "\n" not in text and len(text) < 400
    assert where in text


def test_code_in_the_pickle_does_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(document() | {"meta": Payload()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    (tmp_path / "c.pt").write_bytes(b"not a model\n")
    torch.save({"weight": torch.ones(1)}, tmp_path / "d.pt")
    for name in ("a.pt", "b.pt", "c.pt", "d.pt", "missing.pt"):
        with pytest.raises(LoadError, match=name) as e:
            load_artifact(tmp_path / name)
        assert "\n" not in str(e.value)
    assert not (tmp_path / "ran").exists()


JUNK: list[Any] = [
    None,
    True,
    -1,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    "torch.relu",
    "__class__",
    "body.0",
    [],
    {},
    [[]],
    {"node": "x"},
    {"tuple": 1},
    {"dict": [[1]]},
    {"slice": []},
    {"dtype": "x"},
    {"device": "a b"},
    {"size": ["x"]},
    (1, 2),
    {"a": 1, "b": 2},
    torch.ones(2),
    b"x",
    "a\nb",
]


def mutate(value: Any, rng: random.Random) -> Any:
    """The value with one random place deleted, doubled, swapped or replaced by junk."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key: Any = rng.choice(keys)
        changed: Any = copy.copy(value)
        kind = rng.random()
        if kind < 0.08:
            del changed[key]
        elif kind < 0.12 and isinstance(changed, list):
            changed.insert(key, changed[rng.randrange(len(changed))])
        elif kind < 0.16:
            changed[rng.choice(list(keys))] = changed[key]
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    return rng.choice(JUNK)


@pytest.mark.parametrize("name", NETS)
def test_mutated_documents_load_or_are_refused(name: str) -> None:
    d = document(name) | {"meta": {"sites": ["a", {"b": 1}]}}
    rng = random.Random(name)
    failures = 0
    for _ in range(250):
        try:
            gm = decode(mutate(d, rng))
        except LoadError as e:
            failures += 1
            assert "\n" not in str(e) and str(e)
        else:
            assert isinstance(gm, fx.GraphModule)
    assert failures > 100


def test_allow_list_holds_functions_only() -> None:
    assert len(_functions()) > 500
    assert len(torch_classes()) > 100
    for name, f in _functions().items():
        assert callable(f) and function_named(name, "y") is f
        assert (
            "__" not in name
            and (name.startswith("builtins") or not isinstance(f, type))
            or (f is collections.OrderedDict)
        )
    assert {"relu", "add_", "view", "to"} <= methods()
