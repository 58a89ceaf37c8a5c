"""Peaks composed from profiles of units equal exact fake runs of the schedules, to the byte, on several nets."""

import random

import pytest
from plans import NETS, net_of

from floorplan.budget.net import Costed, Net
from floorplan.cost_models.peaks import Span
from floorplan.ledger.inputs import resized
from floorplan.step.timeline import predict


def exact(net: Net, f: Costed) -> int:
    given = tuple(resized(v, f.batch) for v in net.inputs)
    return predict(net.step(net.schedule(f)), given, resized(net.target, f.batch)).peak


def drawn(net: Net, choose: random.Random) -> Costed:
    """A schedule with up to two cuts, in any forms, with parts that do not divide the batch."""
    last = len(net.groups) - 1
    where = sorted(choose.sample(range(last), min(choose.randint(0, 2), last)))
    edges, batch = [-1, *where, last], choose.choice([13, 16])
    parts = [choose.choice([0, 2, 5, 8]) for _ in edges[1:]]
    forms = tuple(choose.randrange(len(net.kinds)) for _ in net.groups)
    stages = [Span(a + 1, b, s, forms) for a, b, s in zip(edges, edges[1:], parts, strict=False)]
    return net.costed(batch, choose.choice([0, 0, 9]), stages)


@pytest.mark.parametrize("name", NETS)
def test_composed_peaks_are_exact(name: str) -> None:
    net, choose = net_of(name), random.Random(0)
    for _ in range(3 if name == "mobile" else 6):
        f = drawn(net, choose)
        assert f.peak == exact(net, f), (f.batch, f.micro, f.stages)


def test_work_is_linear_in_the_part_size() -> None:
    net = net_of("residual")
    one, two = (sum(net.work(k, n, 0).macs for k in range(len(net.groups) + 1)) for n in (8, 16))
    merges = 2 * one - two  # what does not depend on the size
    assert 0 < merges < one
    assert 2 * net.work(0, 24, 0).macs == pytest.approx(net.work(0, 16, 0).macs + net.work(0, 32, 0).macs)


def test_a_schedule_names_its_cuts_and_the_forms_of_its_sites() -> None:
    net = net_of("residual")
    last = len(net.groups) - 1
    merged, branched = (net.schedule(net.costed(8, 4, [Span(0, last, 0, (k,) * (last + 1))])) for k in (0, 1))
    assert merged.micro_batch == 4 and not merged.stages and merged.branches == merged.reuse == ()
    assert branched.branches == tuple(n for sites in net.sites for n in sites) != ()
    cut = net.schedule(net.costed(8, 0, [Span(0, 0, 2, (0,) * (last + 1)), Span(1, last, 0, (0,) * (last + 1))]))
    assert cut.stages == ((net.cuts[net.groups[0][1]], 2),) and cut.last == 0


def test_seconds_follow_the_clock() -> None:
    net = net_of("residual")
    whole = net.costed(8, 0, [Span(0, len(net.groups) - 1, 0, (0,) * len(net.groups))])
    assert whole.seconds == pytest.approx(sum(net.seconds(k, 8, 0) for k in range(len(net.groups) + 1)))
    assert 0 < net.work_of(whole).seconds(net.time_of) <= whole.seconds  # a piece is bound by flops or by bytes
    parts = net.costed(16, 8, whole.stages)
    assert parts.seconds == pytest.approx(2 * whole.seconds) and parts.peak > whole.peak
