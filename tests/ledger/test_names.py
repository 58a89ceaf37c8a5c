"""Sizes read as formulas in B, C, H, W, r."""

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hard_nets import Lambda, block2, pair, same
from kinds import images
from symbols import C1, C2, H0, VALUES, W0, B, R, fakes, sized
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv

import floorplan
from floorplan.graph.trace import trace
from floorplan.ledger.fakes import Sizes, symbolic_fakes
from floorplan.ledger.names import Namer
from floorplan.ledger.run import Step, Watch, run


def namer(model: nn.Module, x: Tensor) -> Namer:
    f = symbolic_fakes(trace(model, (x,)).gm, (x,), Sizes("primes"))
    run(Step(f.gm, f.inputs).forward, Watch(hooks=True), f)
    return Namer(f)


def test_formulas_of_a_site() -> None:
    report = floorplan.check(Lambda(block2, **pair(8)), images(), rank=2, sites="all")
    assert {e.expr for e in report.proof.kept} == {"4*B*r*H0*W0", "ceil(B*C1*H0*W0/8)"}
    assert [e.shape for e in report.proof.kept if e.pillar == "adapter"] == [("B", "r", "H0", "W0")] * 2


def test_strided_positions_get_names() -> None:
    model = Lambda(lambda m, x: m.c2(F.silu(m.c1(x))), c1=same(3, 8, stride=2), c2=same(8, 4))
    report = floorplan.check(model, images(4, 3, 12, 10))
    kept = report.proof.kept[0]
    assert kept.shape == ("B", "C1", "H1", "W1") and kept.expr == "4*B*C1*H1*W1"
    assert (report.proof.symbols["H1"], report.proof.symbols["W1"]) == (6, 5)
    assert kept.width_symbols == ("C1",)


def test_derived_widths() -> None:
    def run(m: Lambda, x: Tensor) -> Any:
        return m.c2(F.silu(F.pad(m.c1(x), (0, 0, 0, 0, 0, 3))))

    report = floorplan.check(Lambda(run, c1=same(3, 8), c2=same(11, 4)), images())
    shapes = {e.shape[1] for e in report.proof.kept}
    assert shapes <= {"C1 + 3", "C3"} and report.predicted.saved == 2 * 4 * 4 * 11 * 144


def test_kinds_of_symbols() -> None:
    n = namer(Lambda(block2, **pair(8)), images())
    b, c, h = (sympy.Symbol(s, positive=True, integer=True) for s in ("B", "C1", "H0"))
    assert n.is_batch(b) and n.is_width(c) and n.is_position(h)
    assert n.at(4 * b * c * h) == 4 * 4 * 8 * 12
    assert n.pinned == [] and n.pinned_widths == {} and n.positions_known


def test_pinned_widths_are_told() -> None:
    n = namer(Lambda(lambda m, x: m.n(m.c1(x)), c1=same(3, 8), n=nn.InstanceNorm2d(8, affine=True)), images())
    assert n.pinned_widths == {"C1": 8}
    assert "C1 = 8 (pinned by the model)" in n.assumptions()


def test_products_are_told_by_value() -> None:
    n = namer(Lambda(block2, **pair(8)), images())
    b, h = (sympy.Symbol(s, positive=True, integer=True) for s in ("B", "H0"))
    assert n.product(4 * b * (h + 1) - 4 * b, [b, h], 4) == 4 * b * h
    assert n.product(4 * b * h + 1, [b, h], 4) is None
    assert n.product(sympy.Integer(4), [], 4) == 4


def test_positions_are_named_in_order_of_appearance() -> None:
    n = Namer(fakes())
    half, mixed = FloorDiv(H0 + 1, 2), FloorDiv(H0 * W0, 3)
    assert [n.show(e) for e in (B, C1 + 3, half, FloorDiv(W0 + 1, 2), mixed, half, H0 + 1)] == [
        "B", "C1 + 3", "H1", "W1", "T1", "H1", "H2",
    ]  # fmt: skip
    assert n.values() == VALUES | {"H1": 6, "W1": 5, "T1": 40, "H2": 13}


def test_formulas() -> None:
    n = Namer(fakes())
    half = FloorDiv(H0 + 1, 2)
    assert n.formula(4 * B * C1 * half * 3, [B, C1, half, sympy.Integer(3)], 4) == "12*B*C1*H1"
    assert n.formula(8 * B * (C1 + 3), [B, C1 + 3], 8) == "8*B*(C1 + 3)"
    assert n.formula(FloorDiv(B * C1 * half + 7, 8), [FloorDiv(B * C1 * half + 7, 8)], 1) == "ceil(B*C1*H1/8)"
    assert n.formula(4 * B * half + 4 * B, [B, half], 4) == "4*B*(H1 + 1)"
    assert n.formula(4 * B + 4, [B + 1], 4) == "4*(B + 1)"
    assert n.formula(sympy.Integer(4), [], 4) == "4"
    for times, text in ((1, "C1 + 2*C2"), (2, "2*(C1 + 2*C2)"), (4, "4*(C1 + 2*C2)")):
        assert n.formula(times * (C1 + 2 * C2), [C1 + 2 * C2], times) == text
    assert n.formula(8 * C1 + 4 * C2, [2 * C1 + C2], 4) == "4*(2*C1 + C2)"
    assert n.formula(4 * C1 + 4 * half, [C1 + half], 4) == "4*(C1 + H1)"


def test_sizes_in_our_symbols() -> None:
    n = Namer(fakes({"C2": 16}))
    assert (n.batch, n.rank) == (B, R)
    assert n.expr(3) == 3 and n.expr(sized(2 * B * H0)) == 2 * B * H0 and n.expr(sized(B * C2)) == 16 * B
    assert n.at(B * C1 + W0) == 4 * 8 + 10 and n.at(sympy.Integer(5)) == 5
    assert [n.is_width(x) for x in (B, C1, H0, R)] == [False, True, False, False]
    assert [n.is_batch(x) for x in (B, C1, H0, R)] == [True, False, False, False]
    assert [n.is_position(x) for x in (B, C1, H0, W0, R)] == [False, False, True, True, False]
    assert all(n.is_position(sympy.Symbol(s)) for s in ("D0", "T3"))


def test_what_a_run_took_for_granted() -> None:
    guards = [H0 > 1, sympy.Gt(W0, 1), sympy.Eq(C2, 16), sympy.Eq(C1, C2), C1 > 3, C1 > 3, sympy.Gt(H0 + W0, 4)]
    n = Namer(fakes({"C2": 16}, guards))
    assert n.pinned == ["C2 = 16"] and n.pinned_widths == {"C2": 16}
    assert n.guards() == list(dict.fromkeys(guards))
    assert n.assumptions() == (
        "C2 = 16 (pinned by the model)",
        "Eq(C1, C2)",
        "C1 > 3",
        "positions stay on this side of 3 size guards (maps larger than one element)",
    )
    free = Namer(fakes())
    assert free.pinned == [] and free.assumptions() == () and free.guards() == []


@pytest.mark.parametrize(
    "pinned,shape,known",
    [
        ({}, (4, 3, 1, 1), True),
        ({}, (4, 3, 2), False),
        ({}, (4, 3, 12, 1), False),
        ({"H0": 12}, (4, 3), False),
        ({"C1": 8, "B": 4}, (4, 9), True),
    ],
)
def test_whether_positions_are_known(pinned: dict[str, int], shape: tuple[int, ...], known: bool) -> None:
    n = Namer(fakes(pinned, inputs=(torch.empty(shape),)))
    assert n.positions_known is known


def test_products_need_both_far_points() -> None:
    n = Namer(fakes())
    one = sympy.Integer(1009)
    assert n.product(4 * B * C1, [B, C1], 4) == 4 * B * C1
    assert n.product(4 * B * C1, [B, C1], 2) is None
    assert n.product(4 * B * one, [B, B], 4) is None  # equal at the first point alone


def test_a_batch_and_a_rank_that_the_run_turned_into_numbers() -> None:
    n = Namer(fakes({"B": 4, "r": 2}))
    assert (n.batch, n.rank) == (4, 2) and n.pinned == ["B = 4", "r = 2"]


def test_formulas_keep_the_order_of_a_shape_and_name_the_longest_position_first() -> None:
    n = Namer(fakes())
    assert n.formula(4 * B * H0, [H0, B], 4) == "4*H0*B"
    assert n.formula(B**2, [B], 1) == "B**2"
    assert [n.show(H0 + 1), n.show(FloorDiv(H0 + 1, 2) + 1)] == ["H1", "H2"]
    bytes_of_bits = FloorDiv(B * (FloorDiv(H0 + 1, 2) + 1) + 7, 8)
    assert n.formula(bytes_of_bits, [bytes_of_bits], 1) == "ceil(B*H2/8)"
    assert all(a.is_positive and a.is_integer for a in n.aliases.values())


def test_an_equation_of_widths_is_told_and_guards_on_maps_are_counted() -> None:
    n = Namer(fakes({}, [sympy.Ge(C1 * H0, 2), sympy.Ne(C1 * W0, 1), sympy.Ge(B * C1, 3)]))
    assert n.assumptions() == (
        "B*C1 >= 3", "positions stay on this side of 2 size guards (maps larger than one element)",
    )  # fmt: skip
