"""The verdict is sound: what reaches the floor is at it, and no trick makes a model look as if it were."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sympy
import torch
import torch.nn.functional as F
from hard_nets import Lambda, block2, pair, same
from kinds import ABOVE, FLOOR, Remember, images
from symbols import C1, C2, H0, VALUES, W0, B, R, evaluate, fakes, sized
from torch import Tensor, fx, nn

import floorplan
from floorplan.graph.fold import to_site
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.pools import PackedMaxPool
from floorplan.ledger.criterion import ABOVE_FLOOR, AT_FLOOR, UNPROVEN, Entry, Proof, prove
from floorplan.ledger.recorder import Saved


@pytest.mark.parametrize("name", FLOOR)
def test_reaches_the_floor(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = FLOOR[name]()
    report = floorplan.check(model, inputs, rank=2, sites="all", measured=True)
    assert report.predicted == report.measured
    assert report.predicted.saved == report.predicted.saved_census
    assert report.verdict == AT_FLOOR, [(e.node, e.reason) for e in report.proof.guilty]


@pytest.mark.parametrize("name", ABOVE)
def test_never_at_the_floor(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ABOVE[name]()
    report = floorplan.check(model, inputs, rank=2, sites="all", measured=True)
    assert report.predicted == report.measured
    assert report.predicted.saved == report.predicted.saved_census
    assert report.verdict != AT_FLOOR
    assert report.proof.guilty and all(e.reason and e.fix for e in report.proof.guilty)


def test_the_rank_of_a_map_as_wide_as_the_rank_is_no_bottleneck() -> None:
    model, inputs = ABOVE["as-wide-as-the-rank"]()
    report = floorplan.check(model, inputs, rank=1, sites="all")
    assert {e.node for e in report.proof.guilty} == {"sigmoid"}


def test_a_hidden_tensor_is_found_by_the_census() -> None:
    report = floorplan.check(*ABOVE["hidden-on-ctx"](), rank=2, sites="all")
    (guilty,) = report.proof.guilty
    assert guilty.hidden and "census" in guilty.reason


class Aside(nn.Module):
    """Puts every input on a list that outlives the step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Tensor]] = [[]]

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].append(x.detach())
        return x * 2


@pytest.mark.parametrize("layer", [Remember, Aside])
def test_a_model_that_stores_tensors_aside_is_not_proved(layer: type[nn.Module]) -> None:
    model = Lambda(lambda m, x: m.aside(m.c1(x)), c1=same(3, 8), aside=layer())
    report = floorplan.check(model, images())
    assert report.verdict == UNPROVEN
    assert report.predicted.saved == report.predicted.saved_census == 4 * 4 * 8 * 144
    assert "outlives the forward" in report.proof.guilty[0].reason


def test_a_measured_figure_that_disagrees_disproves_the_floor() -> None:
    model = Lambda(block2, **pair(8))
    report = floorplan.check(model, images(), rank=2, sites="all", measured=True)
    assert report.verdict == AT_FLOOR and report.measured is not None
    other = replace(report.measured, saved=report.measured.saved + 4)
    assert replace(report, measured=other).verdict == UNPROVEN
    assert "measured differs" in str(replace(report, measured=other))


def test_frozen_models_keep_nothing() -> None:
    model = Lambda(lambda m, x: F.silu(m.c1(x)), c1=same(3, 8)).requires_grad_(False)
    report = floorplan.check(model, images(), measured=True)
    assert report.predicted == report.measured and report.predicted.saved == 0
    assert report.verdict == AT_FLOOR and report.tensors == ()


def test_a_bias_alone_keeps_no_map_before_it() -> None:
    model = Lambda(lambda m, x: m.c2(F.relu(m.c1(x))), c1=same(3, 8), c2=same(8, 4)).requires_grad_(False)
    model.c1.bias.requires_grad_(True)
    report = floorplan.check(model, images(), measured=True)
    assert report.predicted == report.measured and report.predicted.saved == 4 * 4 * 8 * 144


def test_formulas_hold_at_other_sizes() -> None:
    small, large = images(3, 3, 10, 9), images(5, 3, 16, 14)
    model = Lambda(lambda m, x: m.c2(F.silu(m.c1(x))), c1=same(3, 8, stride=2), c2=same(8, 4))
    entries = floorplan.check(model, small).proof.kept
    sizes = {"B": 5, "H0": 16, "W0": 14, "C1": 8, "C2": 3, "C3": 4}
    assert evaluate(entries, sizes) == floorplan.check(model, large).predicted.saved
    assert all(isinstance(e.size, sympy.Expr) for e in entries)


def test_state_and_inputs_stand_apart() -> None:
    report = floorplan.check(Lambda(lambda m, x: m.c1(x), c1=same(3, 8)), images())
    assert {(e.owner, e.verdict) for e in report.tensors} == {("state", "apart"), ("input", "apart")}
    assert report.predicted.saved == 0 and report.predicted.saved_refcount == 4 * 4 * 3 * 144


def saved(*shape: Any, **options: Any) -> Saved:
    """A kept float32 tensor of this shape, changed as told."""
    n, dtype = sympy.prod(shape), options.get("dtype", torch.float32)
    size = sized(n * dtype.itemsize)
    made: dict[str, Any] = dict(owner="kept", maker="aten.add.Tensor", op="relu", module="", dtype=torch.float32)
    made |= {"nbytes": size, "tensor_bytes": size} | options
    return Saved(node="n", shape=tuple(map(sized, shape)), storage=0, **made)


def entry(s: Saved, pinned: dict[str, int] | None = None, opaque: dict[str, str] | None = None, x: Any = ()) -> Entry:
    """What is said of one saved tensor in a graph with a site, a grouped site and other layers."""
    site, grouped = (to_site(nn.Conv2d(4, 4, 1, groups=g)) for g in (1, 2))
    site.adapt(2, torch.Generator())
    grouped.adapt(2, torch.Generator())
    layers = {"lossy": LossyActivation.of(nn.SiLU(), 4), "pool": PackedMaxPool([3, 3], [1, 1], [0, 0], [1, 1])}
    root = nn.ModuleDict({"site": site, "grouped": grouped, "fc": nn.Linear(2, 2), "conv": nn.Conv2d(2, 2, 1)} | layers)
    gm, run = fx.GraphModule(root, fx.Graph()), cast(Any, SimpleNamespace(saved=[s]))
    for name, layer in root.items():
        gm.add_module(name, layer)
    return prove(gm, fakes(pinned, inputs=x), run, opaque or {}).entries[0]


OURS = {"maker": "floorplan.pack_gate.default", "dtype": torch.uint8}
SITE = {"op": "FusedConv", "module": "site"}
PLAIN, PINNED = (torch.zeros(1, 1, 5, 1),), "a plain number stands where a width is expected: a width was pinned"
NO_BOTTLENECK = "full precision, no bottleneck: 2 groups of rank 2, as wide as the 4 inputs"
UNKNOWN = "positions are plain numbers, so whether it grows with them is unknown"


@pytest.mark.parametrize(
    "made,options,verdict,reason",
    [
        (saved(C1, owner="state"), {}, "apart", "model state"),
        (saved(B, H0, owner="input"), {}, "apart", "the caller's input"),
        (saved(B, C1, H0), {}, "above", "full precision and grows with C1"),
        (saved(B, C2, C1), {}, "above", "full precision and grows with C1, C2"),
        (saved(C1, C2), {}, "floor", "independent of batch and positions"),
        (saved(B, C1, H0, **OURS), {}, "floor", "packed to at most 8 bits an element"),
        (saved(B, C1, H0, dtype=torch.uint8), {}, "above", "full precision and grows with C1"),
        (saved(B, C1, H0, maker="floorplan.x"), {}, "above", "full precision and grows with C1"),
        (
            saved(B, C1, **OURS, op="LossyActivation", module="lossy"),
            {},
            "floor",
            "LOSSY: 4 bits an element of an approximate derivative",
        ),
        (
            saved(B, C1, dtype=torch.uint8, maker="aten.mkldnn_rnn_layer.default"),
            {},
            "unproven",
            "a workspace of the fused LSTM: its size is measured, not derived",
        ),
        (
            saved(B, C1, H0, hidden=True),
            {},
            "above",
            "hidden from save_for_backward, found by the census; full precision and grows with C1",
        ),
        (saved(B, 5, H0, module="conv"), {}, "unproven", PINNED),
        (
            saved(B, 5, H0, module="conv"),
            {"opaque": {"conv": "it has hooks"}},
            "unproven",
            "inside conv, which was not traced: it has hooks",
        ),
        (
            saved(B, 16, H0),
            {"pinned": {"C2": 16}},
            "above",
            "full precision and as wide as C2, which the model ties to a number",
        ),
        (saved(B, 5, 16), {"pinned": {"C2": 16}}, "unproven", PINNED),
        (saved(B, R, H0, W0, **SITE), {}, "floor", "the rank-r bottleneck"),
        (saved(B, 2 * R, H0, op="FusedConv", module="grouped"), {}, "above", NO_BOTTLENECK),
        (saved(B, R, H0, op="FusedConv", module="grouped"), {}, "unproven", PINNED),
        (saved(B, 2 * R, H0, **SITE), {}, "unproven", PINNED),
        (saved(2 * B, R, H0, **SITE), {}, "unproven", PINNED),
        (saved(B, R, R, **SITE), {}, "unproven", PINNED),
        (saved(B, R, **SITE), {}, "unproven", PINNED),
        (saved(B, R, H0, module="conv"), {}, "unproven", PINNED),
        (saved(7, 5), {"x": PLAIN}, "unproven", UNKNOWN),
        (saved(C1, C2), {"x": PLAIN}, "unproven", UNKNOWN),
        (saved(), {"x": PLAIN}, "floor", "independent of batch and positions"),
        (saved(C1), {"x": PLAIN}, "floor", "independent of batch and positions"),
        (saved(1), {"x": PLAIN}, "floor", "independent of batch and positions"),
        (saved(16), {"x": PLAIN, "pinned": {"C2": 16}}, "floor", "independent of batch and positions"),
        (saved(16), {"x": PLAIN}, "unproven", UNKNOWN),
        (saved(R), {"x": PLAIN}, "unproven", UNKNOWN),
    ],
)
def test_what_is_said_of_a_tensor(made: Saved, options: dict[str, Any], verdict: str, reason: str) -> None:
    e = entry(made, **options)
    assert (e.verdict, e.reason) == (verdict, reason)
    assert bool(e.fix) == (verdict in ("above", "unproven"))


def test_an_entry_in_the_readers_words() -> None:
    assert entry(saved(B, C1, H0 + 1, W0)) == Entry(
        node="n", op="relu", module="", pillar="activation", owner="kept", shape=("B", "C1", "H1", "W0"),
        dtype="float32", bits_per_element=32.0, storage=0, nbytes=4 * 4 * 8 * 13 * 10, tensor_bytes=4 * 4 * 8 * 13 * 10,
        expr="4*B*C1*H1*W0", size=4 * B * C1 * (H0 + 1) * W0, width_symbols=("C1",), verdict="above",
        reason="full precision and grows with C1",
        fix="if it is piecewise linear, `floorplan rewrite` keeps one bit; a smooth one needs exact recomputation or a "
        "labelled lossy derivative",
    )  # fmt: skip
    whole = entry(saved(B, C1, nbytes=sized(8 * B * C1), hidden=True))
    assert (whole.nbytes, whole.tensor_bytes, whole.hidden) == (8 * 4 * 8, 4 * 4 * 8, True)
    offsets = saved(B, **OURS, op="PackedMaxPool", module="pool")
    assert entry(saved(B, **OURS)).bits_per_element == 1 and entry(offsets).bits_per_element == 4
    assert entry(saved(B, C2, C1)).width_symbols == ("C1", "C2")
    spread = saved(B, C1, nbytes=sized(4 * B * (C1 + 1) - 4 * B))
    assert entry(spread).size == 4 * B * C1 and entry(spread).expr == "4*B*C1"


def proof(*found: Saved, pinned: dict[str, int] | None = None) -> Proof:
    gm, run = fx.GraphModule(nn.Module(), fx.Graph()), cast(Any, SimpleNamespace(saved=list(found)))
    return prove(gm, fakes(pinned), run, {})


def test_the_worst_entry_is_the_verdict() -> None:
    floor, state, above, unproven = saved(C1), saved(B, C1, owner="state"), saved(B, C1), saved(B, 5)
    assert proof().verdict == proof(floor, state).verdict == AT_FLOOR
    assert proof(floor, unproven).verdict == UNPROVEN and proof(unproven, above).verdict == ABOVE_FLOOR
    assert proof(floor, pinned={"B": 4}).verdict == UNPROVEN
    assert proof(saved(B, C1, H0), pinned={"B": 4}).verdict == ABOVE_FLOOR
    assert proof(floor, pinned={"C2": 16}).verdict == AT_FLOOR
    assert proof(saved(0), saved(C1)).entries == proof(saved(C1)).entries
    both = proof(floor, state, above, unproven)
    assert both.kept == [both.entries[0], *both.entries[2:]] and both.guilty == list(both.entries[2:])
    assert both.symbols == VALUES and both.layers == {"C1": "a", "C2": "b"} and both.assumptions == ()


def test_bytes_at_other_sizes_count_a_storage_once() -> None:
    first, second = proof(saved(B, C1, H0), saved(B, C1, owner="input")).entries
    other = replace(first, storage=1, size=4 * B)
    assert evaluate([first, first, second, other], VALUES | {"B": 7}) == 4 * 7 * 8 * 12 + 4 * 7
