"""Sizes that are asked for by name, and points at which comparisons of them answer as wanted."""

import sympy
import torch

from floorplan.ledger.points import Axes, holds, said, solutions

B, H = (sympy.Symbol(n, positive=True, integer=True) for n in ("B", "H0"))
GIVEN = {"B": 8, "H0": 32}


def test_a_point_answers_as_wanted_near_the_given_sizes() -> None:
    assert next(solutions([(B > 16, True)], GIVEN)) == {"B": 24, "H0": 32}
    assert next(solutions([(B > 16, False), (sympy.Eq(H, 77), True)], GIVEN))["H0"] == 77
    assert holds(B * H > 9999, next(solutions([(B * H > 9999, True)], GIVEN))) is True
    assert list(solutions([(B > 16, True), (B < 4, True)], GIVEN)) == []
    assert holds(B > sympy.Symbol("C1"), GIVEN) is None and said(GIVEN) == "B = 8, H0 = 32"


def test_inputs_of_a_point_keep_their_memory_order_and_values() -> None:
    x = torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
    axes = Axes.plain((x, 3))
    assert axes.given == {"B": 2, "H0": 4, "W0": 2} and axes.positions(0.5) == {"H0": 2, "W0": 1}
    made, other = axes.at((x, 3), {"B": 3, "H0": 2, "W0": 2}, filled=True)
    assert made.is_contiguous(memory_format=torch.channels_last) and other == 3
    assert torch.equal(made, x[[0, 1, 0], :, :2])
