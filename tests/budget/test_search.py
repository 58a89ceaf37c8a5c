"""The schedules that are considered: each once, within the batch, and grown to the room there is."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from plans import NETS, net_of
from steps import by_autograd, gradients, worst

from floorplan.budget.net import Costed
from floorplan.budget.search import STEEP, exact, fastest, grown, more, places, schedules, uncut
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import LOSSES
from floorplan.step.compile import compile_step
from floorplan.step.timeline import measure

BATCH = 16


def test_each_schedule_is_considered_once() -> None:
    net = net_of("residual")
    found = list(schedules(net, BATCH))
    assert len({(f.micro, f.stages) for f in found}) == len(found) > 50
    assert {f.micro for f in found} == {0, 1, 2, 4, 8} and all(f.batch == BATCH for f in found)
    assert {len(f.stages) for f in found} == {1, 2, 3}
    for f in found:
        sizes = [s.size or f.micro or BATCH for s in f.stages]
        assert all(b <= STEEP * a for a, b in zip(sizes, sizes[1:], strict=False))
        edges = [i for s in f.stages for i in (s.first, s.last + 1)]
        assert edges[0] == 0 and edges[-1] == len(net.groups) and edges[1:-1:2] == edges[2:-1:2]


def test_without_cuts_the_batch_alone_is_taken_apart() -> None:
    net = net_of("residual")
    found = list(uncut(net, 6))
    assert {f.micro for f in found} == {0, 1, 2, 4} and all(len(f.stages) == 1 for f in found)
    smallest, largest = (min(f.peak for f in found if f.micro == m) for m in (1, 0))
    assert smallest < largest


def test_two_cuts_are_tried_where_maps_have_become_small() -> None:
    net = net_of("mobile")
    found = places(net)
    widths = [net.unit(k + 1, 8, 0).enters for k in found]
    assert widths == sorted(widths, reverse=True) and found == sorted(found)


def test_parts_grow_to_the_room_and_no_further() -> None:
    net = net_of("residual")
    start = next(f for f in schedules(net, BATCH) if f.micro == 1 and len(f.stages) == 1)
    room = 3 * start.peak
    best = grown(net, start, room)
    assert best.micro > 1 and best.peak <= room < min(f.peak for f in more(net, best))
    assert grown(net, start, start.peak) == start


def test_one_more_sample_is_asked_of_each_part() -> None:
    net = net_of("residual")
    cut = next(f for f in schedules(net, BATCH) if f.micro == 8 and [s.size for s in f.stages] == [2, 0])
    assert [(f.micro, [s.size for s in f.stages]) for f in more(net, cut)] == [(9, [2, 0]), (8, [3, 0])]
    whole = next(f for f in schedules(net, BATCH) if not f.micro and len(f.stages) == 1)
    assert more(net, whole) == []


FEW = 13


@cache
def considered(name: str) -> tuple[Costed, ...]:
    return tuple(schedules(net_of(name), FEW))


def budgets(name: str) -> Iterator[int]:
    """Rooms as 16, 32, 64 and 128 MB are to the nets at full size: an eighth of the whole batch's peak, and doubled."""
    whole = next(f for f in considered(name) if not f.micro and len(f.stages) == 1)
    yield from (whole.peak // 8 * k + 1 for k in (1, 2, 4, 7))


@pytest.mark.parametrize("name", NETS)
def test_measured_is_predicted_and_one_more_sample_does_not_fit(name: str) -> None:
    net, seen = net_of(name), set[Any]()
    for room in budgets(name):
        choice = fastest(net, considered(name), room)
        assert choice is not None
        step, timeline = exact(net, choice)
        assert timeline.peak == choice.peak <= room
        given = filled(net.inputs, FEW)
        target = torch.arange(FEW) % 5
        assert measure(step, given, target).peak == choice.peak
        assert all(f.peak > room for f in more(net, choice))
        seen.add(net.schedule(choice))
    assert len(seen) > 1


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_the_choice_are_autograds(name: str) -> None:
    net = net_of(name)
    choice = fastest(net, considered(name), next(budgets(name)))
    assert choice is not None
    gm = copy.deepcopy(net.gm).eval().double().to(memory_format=torch.contiguous_format)
    given = tuple(v.double() for v in filled(net.inputs, FEW))
    target = torch.arange(FEW) % 5
    _, want = by_autograd(gm, given, target, LOSSES["cross_entropy"])
    compile_step(gm, "cross_entropy", given, plan=net.schedule(choice))(*given, target)
    assert worst(gradients(gm), want) <= 1e-12
