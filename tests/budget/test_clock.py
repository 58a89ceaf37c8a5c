"""The clock of a program: anchored to its real steps."""

import time

import pytest
import torch
from torch import Tensor

from floorplan.budget.clock import Clock, anchored, error_of
from floorplan.budget.work import Worked
from floorplan.cost_models.roofline import Fitted, Machine

KNOWN = {
    "all": Fitted(Machine(1e9, 1e8, 1e-3), 0.1, 0.2),
    "dense, contiguous": Fitted(Machine(1e8, 1e9, 0.0), 0.0, 0.0),
}


def test_the_slower_of_a_kind_and_all_counts() -> None:
    clock = Clock(KNOWN)
    assert clock("pack", (0.0, 1e8, 2.0)) == pytest.approx(1.002)
    assert clock("dense, contiguous", (1e8, 0.0, 1.0)) == pytest.approx(1.0)
    assert clock("dense, contiguous", (0.0, 1e8, 1.0)) == pytest.approx(1.001)


def test_overhead_and_scale_come_from_real_steps() -> None:
    def work(n: int) -> Worked:
        return Worked({"all": (0.0, 1e6 * n, 10.0)})

    def step(n: int) -> object:
        def run() -> Tensor:
            end = time.process_time() + 0.02 + 0.002 * n
            while time.process_time() < end:
                pass
            return torch.zeros(())

        return run

    clock = anchored(KNOWN, work, step)
    assert clock("all", (0.0, 1e6 * 16, 10.0)) == pytest.approx(0.052, rel=0.2)
    assert clock.error is not None and clock.error < 0.2
    assert "misses one between by" in error_of([clock, Clock(KNOWN)])
    assert "no real step" in error_of([Clock(KNOWN)])
