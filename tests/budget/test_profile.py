"""Profiles of a step cut into units: where units end, and what is a line in the part size."""

from dataclasses import replace
from typing import Any

from plans import net_of

from floorplan.budget.profile import Profile, cuts, joints, linear, profiled, sized
from floorplan.budget.work import Worked
from floorplan.cost_models.peaks import Back, Head, Unit
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


LATE = 99  # never let go
STEP = Profile(
    #     forward 0   forward 1  head      backward 1  backward 0  the head alone
    died=(1, 3, 8, 5, 6, 7, LATE, 9, LATE, 10),
    nbytes=(10, 20, 5, 8, 4, 8, 6, 20, 3, 4),
    what=(("", "", ""),) * 10,
    forward=((0, 2), (2, 4)),
    head=(4, 6),
    backward=((8, 9), (6, 8)),
    alone=(9, 10),
    enters=((), (1,), (3,)),
    copies=(),
    grad_in=(7, 5),
    grad_out=(-1, 7),
    grads=frozenset((6, 8)),
    loss=4,
    mean=True,
    work=tuple((Worked({"all": (k, 0, 1)}), Worked({"all": (0, k, 1)})) for k in (1.0, 2.0, 4.0)),
)


def test_a_cut_is_where_one_value_crosses_and_is_let_go() -> None:
    assert joints(STEP) == [0]
    assert joints(replace(STEP, died=(1, 8, *STEP.died[2:]))) == []  # the next forward does not let it go
    assert joints(replace(STEP, enters=((), (0, 1), (3,)))) == []


def test_units_by_themselves() -> None:
    found = sized(STEP, [(0, 0), (1, 1)])
    assert found.units[0] == Unit(0, 20, 20, 0, 3, Back(23, 23, 3, 3), False, until=20)
    assert found.units[1] == Unit(20, 25, 13, 5, 6, Back(31, 25, 31, 25), True, until=5)
    assert found.head == Head(8, (4, 4), (12, 12), 0, 4)
    assert sized(replace(STEP, mean=False), [(0, 1)]).head.shared == (4, 4)  # a sum needs no share of the loss


def test_stages_of_a_group_are_one_unit() -> None:
    (unit,) = sized(STEP, [(0, 1)]).units
    assert (unit.enters, unit.owned, unit.kept, unit.grads, unit.learns) == (0, 25, 5, 9, False)
    assert unit.back == Back(31, 25, 31, 25)


def test_work_of_a_group_adds_up() -> None:
    apart, together = sized(STEP, [(0, 0), (1, 1)]).work, sized(STEP, [(0, 1)]).work
    assert apart[0] == STEP.work[0] and apart[-1] == together[-1] == STEP.work[-1]
    assert together[0] == (Worked({"all": (3.0, 0, 2)}), Worked({"all": (0, 3.0, 2)}))


def test_a_gradient_in_the_buffer_that_came() -> None:
    (_, unit) = sized(replace(STEP, grad_out=(-1, 5)), [(0, 0), (1, 1)]).units
    assert unit.learns and unit.through
    (frozen,) = sized(replace(STEP, backward=(None, None)), [(0, 1)]).units
    assert frozen.back is None and not frozen.grads and not frozen.learns
