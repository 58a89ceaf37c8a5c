"""Profiles of a step cut into units: where units end, and what is a line in the part size."""

from typing import Any

from plans import net_of

from floorplan.budget.profile import cuts, linear, profiled
from floorplan.budget.units import joints
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.inputs import resized


def test_units_end_where_one_value_crosses() -> None:
    net = net_of("mobile")
    assert cuts(net.studied) == net.cuts
    assert len(net.groups) > 8
    assert net.groups[0][0] == 0 and net.groups[-1][1] == len(net.cuts)
    assert all(b + 1 == c for (_, b), (c, _) in zip(net.groups, net.groups[1:], strict=False))


def test_a_line_holds_where_the_events_do() -> None:
    net = net_of("residual")
    step = net.profiles[0].step

    def at(n: int) -> Any:
        return profiled(step, concrete_fakes(net.gm, [resized(v, n) for v in (*net.inputs, net.target)]))

    low, high = at(8), at(16)
    found = linear(low, high, (8, 16))
    assert found is not None
    other = at(24)
    assert found.at(24).nbytes == other.nbytes
    assert joints(other) == joints(low)
    assert not net.profiles[0].holds  # some sums run in eight slices, which 13 samples fill unevenly
    assert net.profiles[0].at(13).nbytes == at(13).nbytes != found.at(13).nbytes
    assert linear(low, at(2), (8, 2)) is None  # two slices
