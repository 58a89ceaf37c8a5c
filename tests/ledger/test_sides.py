"""Assumptions about the batch are tried on their other side."""

import torch
from small import Residual

import floorplan
from floorplan.ledger.criterion import evaluate


def test_a_batch_guard_is_tried_on_the_other_side() -> None:
    for batch in (2, 20):
        report = floorplan.check(Residual(), torch.randn(batch, 3, 16, 16), rank=2, sites="all")
        about = [a for a in report.proof.assumptions if a.startswith("B ")]
        assert all("tried at B =" in a for a in about)


def test_the_formulas_hold_at_any_batch() -> None:
    small = floorplan.check(Residual(), torch.randn(3, 3, 16, 16))
    large = floorplan.check(Residual(), torch.randn(40, 3, 16, 16))
    at_40 = evaluate(small.proof.kept, {**small.proof.symbols, "B": 40})
    assert at_40 == large.predicted.saved
