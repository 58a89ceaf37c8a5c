"""Peaks of schedules put together from two units and a head, by hand; that real steps have them is tested in budget."""

import pytest

from floorplan.cost_models.peaks import Back, Composer, Head, Span, Unit, Whole, sizes


def unit(k: int, size: int, form: int) -> Unit:
    """Two units: one that reads the caller's batch, and one that reads its map. Gradients alone do not grow."""
    if k == 0:
        return Unit(0, 100 * size, 100 * size, 10 * size, 6, Back(50 * size, 50 * size, 40 * size, 40 * size), False)
    wide = 70 if form == 0 else 45
    back = Back(30 * size, 32 * size, 22 * size, 24 * size)
    return Unit(20 * size, wide * size, (wide - 20) * size, 5 * size, 8, back, True)


def head(size: int, entire: bool) -> Head:
    return Head(4 * size, (9 * size, 12 * size), (10 * size, 13 * size), 2, 4)


def peak(batch: int, micro: int, *stages: Span) -> int:
    return Composer(2, unit, head).peak(batch, micro, stages)


def test_parts_of_a_batch() -> None:
    assert sizes(10, 4) == [(4, 2), (2, 1)]
    assert sizes(8, 4) == [(4, 2)] and sizes(8, 0) == sizes(8, 9) == [(8, 1)]


def test_a_whole_batch_is_the_fullest_of_its_moments() -> None:
    whole = Span(0, 1, 0, (0, 0))
    assert peak(8, 0, whole) == 8 * 100  # the first unit's forward: nothing else is there
    wide = Span(0, 1, 0, (0, 0))
    assert Composer(2, lambda k, n, f: unit(k, n, f) if k else Unit(0, 9, 9, 10 * n, 6, None, False), head).peak(
        8, 0, [wide]
    ) == 8 * (10 + 70)  # behind what the first keeps, the second's forward


def test_micro_batches_hold_gradients_and_losses_of_those_before() -> None:
    grads = 6 + 8 + 2
    assert peak(8, 4, Span(0, 1, 0, (0, 0))) == 4 * 100 + grads + 4  # the second of two: one loss waits
    assert peak(8, 2, Span(0, 1, 0, (0, 0))) == 2 * 100 + grads + 2 * 4  # from the third on: a sum and a new one


def test_forms_of_a_unit_are_its_own() -> None:
    assert peak(8, 0, Span(1, 1, 0, (0, 0))) == 8 * 70
    assert peak(8, 0, Span(1, 1, 0, (0, 1))) == 8 * 45


def test_what_crosses_a_cut_is_kept_whole() -> None:
    cut = Span(0, 0, 2, (0, 0)), Span(1, 1, 0, (0, 0))
    forward = 3 * 2 * 10 + 2 * 100 + 8 * 20  # the last part: what three keep, its own forward, the whole map behind it
    second = 8 * 10 + 8 * 70  # all that the first unit keeps, and the second's forward, its input included
    assert peak(8, 0, *cut) == max(forward, second) == 640
    assert peak(8, 0, Span(0, 0, 1, (0, 0)), cut[1]) == second  # smaller parts of the first do not help the second


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_last_stage_goes_there_and_back_part_by_part(size: int) -> None:
    stages = Span(0, 0, 1, (0, 0)), Span(1, 1, size, (0, 0))
    forward = 7 * 10 + 100 + 8 * 20
    parts = 8 * 10 + 8 * 20 + size * 50 + (8 + 2) + 4 * min(8 // size - 1, 2)
    assert peak(8, 0, *stages) == max(forward, parts)


def twice(batch: int, micro: int, *stages: Span) -> int:
    """A loss of all pairs behind two units, outputs of 4 bytes a sample."""

    def seed(size: int, entire: bool) -> Head:
        return Head(4 * size, (9 * size,) * 2, (9 * size,) * 2, 2, 4, ahead=7 * size, outputs=4 * size)

    def whole(n: int) -> Whole:
        return Whole(4 * n, 5 * n * n, 4 * n + 4)

    return Composer(2, unit, seed, whole).peak(batch, micro, stages)


def test_two_passes_hold_outputs_and_their_gradients() -> None:
    whole = Span(0, 1, 0, (0, 0))
    assert twice(8, 0, whole) == 8 * 100  # the loss sees the batch at once: one pass
    grads = 6 + 8 + 2
    assert twice(8, 4, whole) == (4 * 8 + 4) + 4 * 100 + grads + 4  # the second pass, gradients of outputs held
    assert twice(64, 1, whole) == 5 * 64 * 64  # the loss itself


def test_what_waits_for_the_backward() -> None:
    compose = Composer(2, unit, head)
    assert compose.kept(8, 0, (Span(0, 1, 0, (0, 0)),)) == 8 * (10 + 5)
    assert compose.kept(8, 0, (Span(0, 0, 2, (0, 0)), Span(1, 1, 2, (0, 0)))) == 8 * 10 + 2 * 5
    assert compose.kept(8, 4, (Span(0, 1, 0, (0, 0)),)) == 4 * (10 + 5)
