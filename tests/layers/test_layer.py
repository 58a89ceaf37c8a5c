"""Every layer of ours through check, compare, save, load and merge: what it says about itself holds."""

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import floorplan
from floorplan.graph import driver
from floorplan.graph.driver import Pass, Site
from floorplan.graph.trace import trace
from floorplan.layers.activations import PackedActivation
from floorplan.layers.adapter import ConvAdapter, zero_factors
from floorplan.layers.branch import RankBranch
from floorplan.layers.dropout import PackedDropout
from floorplan.layers.factor import FactorConv
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.layers.layer import Adapter, Layer
from floorplan.layers.lite import FrozenConv, LiteResidual, TinySite
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.paper import PaperSite
from floorplan.layers.plain import AnyBatchNorm, Clamp, TrainingFlag
from floorplan.layers.pools import PackedMaxPool, ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.layers.promises import Forgetful, Keep, Promise
from floorplan.methods import catalogue
from floorplan.methods.catalogue import Method, Options
from floorplan.methods.merge import difference
from floorplan.methods.verify import randomize_adapters, set_plain, values
from floorplan.passes.insert_memflora import memflora
from floorplan.store.modules import own_classes

CONV = nn.Conv2d(4, 4, 3, padding=1)
GEO, WEIGHT = geometry_of(CONV).config(), list(CONV.weight.shape)
RELU6 = {"name": "ReLU6", "options": {}}
SIGMOID = ("function", "torch.sigmoid")
X = torch.randn(2, 4, 8, 8)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fused() -> FusedConv:
    site = FusedConv(GEO, WEIGHT, scale=True, act=RELU6)
    site.adapt(2, generator())
    return site


MAKE: dict[type[nn.Module], Callable[[], Any]] = {
    AnyBatchNorm: lambda: AnyBatchNorm(4, fixed=True),
    ChannelAffine: lambda: ChannelAffine(4),
    Clamp: lambda: Clamp(-0.5, 0.5),
    FactorConv: lambda: FactorConv.of(CONV, 2, generator(), 1.5),
    Forgetful: lambda: Forgetful(*SIGMOID),
    FrozenConv: lambda: FrozenConv(GEO, WEIGHT, True),
    FusedConv: fused,
    Keep: Keep,
    LiteResidual: lambda: LiteResidual(4, 4),
    LoraC: lambda: LoraC.of(CONV, 2, generator(), 1.5),
    LoraCOfficial: lambda: LoraCOfficial.of(CONV, 2, generator(), 1.5),
    LossyActivation: lambda: LossyActivation("SiLU", 3),
    PackedMaxPool: lambda: PackedMaxPool([2, 2], [2, 2], [0, 0], [1, 1]),
    PaperSite: lambda: PaperSite(4, GEO, WEIGHT, bias=True, rank=2, act=RELU6),
    Promise: lambda: Promise(*SIGMOID),
    RankBranch: lambda: RankBranch(GEO, WEIGHT, 2),
    ShapeAdaptiveAvgPool: lambda: ShapeAdaptiveAvgPool([2, None]),
    ShapeAvgPool: lambda: ShapeAvgPool([2, 2], [2, 2], [0, 0]),
    SideConv: lambda: SideConv.of(CONV, 2, generator(), 1.5),
    TinySite: lambda: TinySite(4, GEO, WEIGHT, bias=True, act=RELU6),
    TrainingFlag: TrainingFlag,
    PackedActivation: lambda: PackedActivation("PReLU", {"num_parameters": 4}),
    PackedDropout: lambda: PackedDropout("Dropout2d", 0.5),
}
REMAT = (Keep, Promise, Forgetful)
REFUSED = (LiteResidual, TinySite, *REMAT)
STAYS = {TrainingFlag}  # no call of torch computes it: merge leaves it


def below(cls: type[Layer]) -> Iterator[type[Layer]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


def test_every_class_has_a_name_in_files_and_a_case() -> None:
    named, bases = set(own_classes().values()), {Adapter, ConvAdapter}
    ours = {c for c in below(Layer) if c.__module__.startswith("floorplan.") and not c.__name__.startswith("_")}
    assert named == ours - bases == set(MAKE)


def put(kind: type[nn.Module]) -> Pass:
    """A pass that lets the graph call a layer of this class, by the path `layer`, before all else."""

    def run(gm: fx.GraphModule) -> Iterator[Site]:
        torch.manual_seed(0)
        layer = MAKE[kind]()
        for t in layer.buffers():
            if not t.any() and t.is_floating_point():
                nn.init.normal_(t)
        gm.add_submodule("layer", layer)
        x = next(n for n in gm.graph.nodes if n.op == "placeholder")
        readers = list(x.users)
        with gm.graph.inserting_after(x):
            y = _call(gm, x, kind)
        for reader in readers:
            reader.replace_input_with(x, y)
        yield Site("layer")

    return Pass("put", run)


def _call(gm: fx.GraphModule, x: fx.Node, kind: type[nn.Module]) -> fx.Node:
    graph, last = gm.graph, x

    def after(make: Callable[..., fx.Node], *args: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = make(*args)
        return last

    if kind in REMAT:
        paths = {k: "layer" if k is kind else k.__name__.lower() for k in REMAT}
        for k, path in paths.items():
            if k is not kind:
                gm.add_submodule(path, MAKE[k]())
        kept = after(graph.call_module, paths[Keep], (x,))
        promised = after(graph.call_module, paths[Promise], ((kept,), {}))
        return after(graph.call_module, paths[Forgetful], ((x,), {}, (), (), promised))
    if kind is TrainingFlag:
        return after(graph.call_function, F.dropout, (x, 0.5, after(graph.call_module, "layer")))
    y = after(graph.call_module, "layer", (x, x) if kind is LiteResidual else (x,))
    if kind is not RankBranch:
        return y
    gm.add_submodule("base", nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False))
    base = after(graph.call_module, "base", (x,))
    return after(graph.call_function, operator.add, (base, y))


def source() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(4, 6, 1))


@pytest.fixture(params=sorted(MAKE, key=lambda k: k.__name__), ids=lambda k: k.__name__)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[type[nn.Module], Method]:
    """A class, and a method that puts it beside a MemFLoRA site."""
    monkeypatch.setattr(catalogue, "_REGISTERED", {})
    kind = request.param
    return kind, floorplan.register(Method(f"with-{kind.__name__}", "", lambda o: (memflora(o.rank), put(kind))))


def graph_of(m: Method) -> Any:
    gm = driver.rewrite(trace(source(), (X,)).gm, m.passes(Options()), lambda *_: None)[0]
    randomize_adapters(gm, 0.3)
    gm.meta["floorplan"] = {"method": m.name}
    return gm


def test_checked_and_compared(case: tuple[type[nn.Module], Method]) -> None:
    kind, m = case
    report = floorplan.check(source(), X, rank=2, method=m.name, measured=True)
    assert set(report.difference.values()) == {0}
    own = [e for e in report.proof.kept if e.module == "layer"]
    assert issubclass(kind, Layer) and {e.pillar for e in own} <= {kind.pillar, "gate"}
    for e in own:
        if e.pillar == "gate":
            assert e.bits_per_element == graph_of(m).get_submodule("layer").packed_bits
        assert not kind.lossy or "LOSSY" in e.reason
    (row,) = floorplan.compare(source(), X, methods=(m.name,), batches=(3,), loss="sum", measured=True).rows
    assert not row.refused and set((row.difference or {}).values()) == {0}
    assert row.macs_paper > 0 and (row.macs or {})["backward"] > 0


def test_saved_loaded_and_merged_or_refused_by_name(case: tuple[type[nn.Module], Method], tmp_path: Path) -> None:
    kind, m = case
    gm = graph_of(m).double()
    floorplan.save(gm, tmp_path / "a.pt")
    back: Any = floorplan.load(tmp_path / "a.pt")
    x = X.double()
    assert type(back.get_submodule("layer")) is kind and difference(gm, back, (x,)) == 0
    if kind in REFUSED:
        with pytest.raises(floorplan.FloorplanError, match=f"method {m.name}: layer is a {kind.__name__}, which"):
            floorplan.merge(back)
        return
    merged = floorplan.merge(back)
    assert difference(back, merged, (x,)) <= 1e-12
    left = {type(layer) for layer in merged.modules() if isinstance(layer, Layer)}
    assert left <= STAYS
    single = floorplan.merge(gm.float())
    assert {t.dtype for t in single.state_dict().values() if t.is_floating_point()} == {torch.float32}
    assert difference(gm, single, (X,)) <= 1e-5
    floorplan.save(merged, tmp_path / "merged.pt")
    assert difference(merged, floorplan.load(tmp_path / "merged.pt"), (x,)) == 0


def test_an_adapters_factors_are_those_it_names(case: tuple[type[nn.Module], Method]) -> None:
    kind, m = case
    layer = graph_of(m).double().get_submodule("layer")
    if not isinstance(layer, Adapter) or not layer.rank:
        return
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name, letters in layer.axes().items():
        assert set(letters) <= set("rC.") and len(letters) <= tensors[name].dim()
        assert all(n == layer.rank for n, a in zip(tensors[name].shape, letters, strict=False) if a == "r")
    root = fx.GraphModule({"layer": layer}, _alone(kind))
    got = values(root, (X.double(),))
    set_plain(root, True)
    want = values(root, (X.double(),))
    assert got.gradients.keys() == want.gradients.keys() != {"input 0"}
    for n, g in want.gradients.items():
        assert float((got.gradients[n] - g).abs().max()) <= 1e-12 * float(g.abs().max())
    factors = zero_factors(root)
    assert factors and all(p.any() for p in factors.values())
    before = root(X.double())
    for p in factors.values():
        p.data.zero_()
    assert not torch.equal(root(X.double()), before)


def _alone(kind: type[nn.Module]) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("layer", (x, x) if kind is LiteResidual else (x,)))
    return graph
