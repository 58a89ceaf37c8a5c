"""Multiply-adds of a step by the paper's convention, by hand."""

from floorplan.layers import macs as formulas
from floorplan.layers.macs import Macs


def test_the_formula_of_a_step() -> None:
    layers = [Macs(100, 10, 7, 50), Macs(30)]
    assert formulas.forward(layers) == 140
    assert formulas.step(layers, 4) == 4 * (280 + 7)
    assert formulas.step(layers, 4, merges=2, replays=True) == 4 * (280 + 7 + 140) + 2 * 50
