"""The choice among schedules: what fits, is measured as predicted, and would not take one more sample."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from plans import NETS, net_of
from steps import by_autograd, gradients, worst

from floorplan.budget.choice import exact, fastest
from floorplan.budget.net import Costed
from floorplan.budget.search import more
from floorplan.budget.search import schedules as considered
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import LOSSES
from floorplan.step.compile import compile_step
from floorplan.step.timeline import measure

BATCH = 13


@cache
def schedules(name: str) -> tuple[Costed, ...]:
    return tuple(considered(net_of(name), BATCH))


def budgets(name: str) -> Iterator[int]:
    """Rooms as 16, 32, 64 and 128 MB are to the nets at full size: an eighth of the whole batch's peak, and doubled."""
    whole = next(f for f in schedules(name) if not f.micro and len(f.stages) == 1)
    yield from (whole.peak // 8 * k + 1 for k in (1, 2, 4, 7))


@pytest.mark.parametrize("name", NETS)
def test_measured_is_predicted_and_one_more_sample_does_not_fit(name: str) -> None:
    net, seen = net_of(name), set[Any]()
    for room in budgets(name):
        choice = fastest(net, schedules(name), room)
        assert choice is not None
        step, timeline = exact(net, choice)
        assert timeline.peak == choice.peak <= room
        given = filled(net.inputs, BATCH)
        target = torch.arange(BATCH) % 5
        assert measure(step, given, target).peak == choice.peak
        assert all(f.peak > room for f in more(net, choice))
        seen.add(net.schedule(choice))
    assert len(seen) > 1


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_the_choice_are_autograds(name: str) -> None:
    net = net_of(name)
    choice = fastest(net, schedules(name), next(budgets(name)))
    assert choice is not None
    gm = copy.deepcopy(net.gm).eval().double().to(memory_format=torch.contiguous_format)
    given = tuple(v.double() for v in filled(net.inputs, BATCH))
    target = torch.arange(BATCH) % 5
    _, want = by_autograd(gm, given, target, LOSSES["cross_entropy"])
    compile_step(gm, "cross_entropy", given, plan=net.schedule(choice))(*given, target)
    assert worst(gradients(gm), want) <= 1e-12
