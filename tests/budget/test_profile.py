"""Peaks composed from unit profiles equal exact fake runs of the schedules, to the byte, on several nets."""

import random
from typing import Any

import pytest
from plans import NETS, net_of

from floorplan.budget.net import Found, Net
from floorplan.budget.profile import cuts, form, joints, trace
from floorplan.cost_models.peaks import Stage
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.inputs import resized
from floorplan.step.timeline import predict


def exact(net: Net, f: Found) -> int:
    given = tuple(resized(v, f.batch) for v in net.inputs)
    return predict(net.step(net.schedule(f)), given, resized(net.target, f.batch)).peak


def drawn(net: Net, choose: random.Random) -> Found:
    """A schedule with up to two cuts, in any forms, with parts that do not divide the batch."""
    last = len(net.groups) - 1
    where = sorted(choose.sample(range(last), min(choose.randint(0, 2), last)))
    edges, batch = [-1, *where, last], choose.choice([13, 16])
    parts = [choose.choice([0, 2, 5, 8]) for _ in edges[1:]]
    forms = tuple(choose.randrange(len(net.kinds)) for _ in net.groups)
    stages = [Stage(a + 1, b, s, forms) for a, b, s in zip(edges, edges[1:], parts, strict=False)]
    return net.found(batch, choose.choice([0, 0, 9]), stages)


@pytest.mark.parametrize("name", NETS)
def test_composed_peaks_are_exact(name: str) -> None:
    net, choose = net_of(name), random.Random(0)
    for _ in range(3 if name == "mobile" else 6):
        f = drawn(net, choose)
        assert f.peak == exact(net, f), (f.batch, f.micro, f.stages)


def test_units_end_where_one_value_crosses() -> None:
    net = net_of("mobile")
    assert cuts(net.studied) == net.cuts
    assert len(net.groups) > 8
    assert net.groups[0][0] == 0 and net.groups[-1][1] == len(net.cuts)
    assert all(b + 1 == c for (_, b), (c, _) in zip(net.groups, net.groups[1:], strict=False))


def test_a_form_holds_where_the_events_do() -> None:
    net = net_of("residual")
    step = net.runs[0].step

    def at(n: int) -> Any:
        return trace(step, concrete_fakes(net.gm, [resized(v, n) for v in (*net.inputs, net.target)]))

    low, high = at(8), at(16)
    found = form(low, high, (8, 16))
    assert found is not None
    other = at(24)
    assert found.trace(24).nbytes == other.nbytes
    assert joints(other) == joints(low)
    assert not net.runs[0].holds  # some sums run in eight slices, which 13 samples fill unevenly
    assert net.runs[0].at(13).nbytes == at(13).nbytes != found.trace(13).nbytes
    assert form(low, at(2), (8, 2)) is None  # two slices


def test_work_is_linear_in_the_part_size() -> None:
    net = net_of("residual")
    one, two = (sum(net.work(k, n, 0).macs for k in range(len(net.groups) + 1)) for n in (8, 16))
    merges = 2 * one - two  # what does not depend on the size
    assert 0 < merges < one
    assert 2 * net.work(0, 24, 0).macs == pytest.approx(net.work(0, 16, 0).macs + net.work(0, 32, 0).macs)
