"""Sizes read as formulas in B, C, H, W, r."""

from typing import Any

import sympy
import torch.nn.functional as F
from hard_nets import Lambda, block2, pair, same
from kinds import images
from torch import Tensor, nn

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
