"""Resident growth: measured in a fresh process, near what a step is known to take."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from small import Residual

from floorplan import rewrite
from floorplan.budget import resident
from floorplan.budget.resident import CLEAR, Growth, growth_of, resident_growth
from floorplan.errors import FloorplanError
from floorplan.graph.trace import trace
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.timeline import predict
from floorplan.timeline.run import step_timeline

MB = 1 << 20
needs_proc = pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="needs Linux's /proc")
GIVEN = {"model": "small:residual", "batch": 64, "shapes": [[3, 32, 32]]}
HERE = f"tests.budget.{Path(__file__).stem}:"


def fill(megabytes: int) -> Callable[[], None]:
    """A step that holds two tensors of so many MB at once, three in all."""

    def step() -> None:
        a = torch.ones(megabytes * MB // 4)
        b = a + 1
        del a
        b.add_(b + 1)

    return step


def autograd_step(batch: int) -> Callable[[], None]:
    """A step of Residual under plain autograd."""
    net, x, y = Residual(), torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        LOSSES["cross_entropy"](net(x), y).backward()
        net.zero_grad(set_to_none=True)

    return step


def broken() -> Callable[[], None]:
    raise ValueError("no such\nmodel")


@needs_proc
def test_growth_of_known_steps() -> None:
    small, large = (resident_growth(f"{HERE}fill", {"megabytes": n}, threads=1).growth for n in (8, 40))
    assert abs(small - 16 * MB) < 2 * MB and abs(large - small - 64 * MB) < 2 * MB


@needs_proc
def test_growth_of_a_training_step() -> None:
    found = resident_growth(f"{HERE}autograd_step", {"batch": 64})
    x = torch.zeros(64, 3, 32, 32)
    gm = trace(Residual(), (x,)).gm
    peak = step_timeline(Step(gm, (x,), target_for(gm, (x,), "cross_entropy"), LOSSES["cross_entropy"])).peak
    # Kernels take working memory of their own: oneDNN's copies in its layout, in the contiguous format.
    assert 0.9 * peak < found.growth < 3 * peak and found.before > 20 * MB
    assert str(found) == f"resident growth {found.growth:,}"


@needs_proc
def test_growth_of_a_compiled_step() -> None:
    schedule = {"micro_batch": 16, "layout": "channels_last"}
    given = GIVEN | {"plan": {"method": "memflora", "sites": "all"}, "schedule": schedule}
    found = resident_growth("floorplan.budget.resident:compiled_step", given, threads=1).growth
    gm = rewrite(Residual(), torch.zeros(64, 3, 32, 32), sites="all", measured=False).module
    x, y = torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64)
    step = compile_step(gm, "cross_entropy", x, plan=Schedule.of(schedule))
    whole = predict(compile_step(gm, "cross_entropy", x), (x,), y).peak
    assert predict(step, (x,), y).peak < found < 0.8 * whole


@needs_proc
@pytest.mark.parametrize(
    "spec,message",
    [
        (f"{HERE}broken", "tests.budget.test_resident:broken: model"),
        ("no_such_module:f", "no_such_module:f: ModuleNotFoundError: .*"),
    ],
)
def test_a_failing_child_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(FloorplanError, match=f"^resident growth: {message}$"):
        resident_growth(spec)


@needs_proc
def test_a_child_that_takes_too_long() -> None:
    with pytest.raises(FloorplanError, match="not done after 0.01 s; give it longer$"):
        resident_growth(f"{HERE}fill", {"megabytes": 1}, timeout=0.01)


def test_where_there_is_no_proc() -> None:
    with patch.object(resident, "CLEAR", Path("/nowhere/clear_refs")):
        with pytest.raises(FloorplanError, match="^resident growth: unavailable, /nowhere/clear_refs cannot be"):
            resident_growth("os:getpid")
        with pytest.raises(FloorplanError, match="^resident growth: unavailable, /nowhere/clear_refs: No such file"):
            growth_of(lambda: None)


def test_growth_is_the_difference() -> None:
    assert Growth(100, 250).growth == 150
