"""The numbers of units, from a profile by hand: two stages of which one value crosses, a head, gradients."""

from dataclasses import replace

from floorplan.budget.profile import Profile
from floorplan.budget.units import joints, sized
from floorplan.budget.work import Worked
from floorplan.cost_models.peaks import Back, Head, Unit

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
    assert found.units[0] == Unit(0, 20, 20, 0, 3, Back(23, 23, 3, 3), False)
    assert found.units[1] == Unit(20, 25, 13, 5, 6, Back(31, 25, 31, 25), True)
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
