"""Composition of a step's peak from numbers: small cases by hand, and a runner that counts for itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from floorplan.cost_models.peaks import Back, Composer, Head, Span, Unit, sizes
from floorplan.errors import FloorplanError
from floorplan.methods.catalogue import Options, Plan
from floorplan.step.schedule import options_in, read_plan, schedule_in

MAP, KEPT, GRAD, LOSS = 100, 10, 7, 4


def unit(k: int, size: int, kind: int) -> Unit:
    """A unit that reads a map, makes one, keeps a tenth: each linear in the part size."""
    enters = MAP * size if k else 0
    back = Back(*(n * size + GRAD for n in (2 * MAP + KEPT,) * 2), *(n * size + GRAD for n in (MAP + KEPT,) * 2))
    return Unit(enters, enters + MAP * size, MAP * size, KEPT * size, GRAD, back, k > 0)


def head(size: int, entire: bool) -> Head:
    """Reads a map, makes a gradient of it, has no parameters."""
    return Head(MAP * size, (MAP * size + LOSS,) * 2, (MAP * size + 2 * LOSS,) * 2, 0, LOSS)


def composer(count: int = 2) -> Composer:
    return Composer(count, unit, head)


def test_parts_of_a_batch() -> None:
    assert sizes(10, 0) == sizes(10, 10) == sizes(10, 12) == [(10, 1)]
    assert sizes(10, 4) == [(4, 2), (2, 1)]
    assert sizes(8, 4) == [(4, 2)]


def test_a_whole_batch_is_fullest_in_the_first_backward() -> None:
    whole = [Span(0, 1)]
    # the loss, two maps and both kept parts, and one gradient being made
    assert composer().peak(3, 0, whole) == LOSS + 3 * (2 * MAP + 2 * KEPT) + GRAD


def test_later_micro_batches_hold_all_gradients_and_two_losses() -> None:
    whole = [Span(0, 1)]
    one = composer().peak(3, 0, whole)
    # first gradients are in the forms of `unit` either way; a later part holds both parameters' gradients as well
    assert composer().peak(6, 3, whole) == one + 2 * GRAD + LOSS
    assert composer().peak(9, 3, whole) == composer().peak(90, 3, whole) == one + 2 * GRAD + 2 * LOSS


def test_a_cut_keeps_what_crosses_whole_and_the_rest_by_parts() -> None:
    cut = composer().peak(8, 0, [Span(0, 0, 2), Span(1, 1, 0)])
    first = LOSS + 8 * MAP + 3 * 2 * KEPT + 2 * (MAP + KEPT) + GRAD + GRAD  # backward of a part, the other's gradient
    second = LOSS + 8 * KEPT + 8 * (2 * MAP + KEPT) + GRAD
    assert cut == max(first, second)


def test_the_last_stage_in_parts_puts_its_gradient_where_the_map_was() -> None:
    got = composer().peak(8, 0, [Span(0, 0, 0), Span(1, 1, 2)])
    inside = 2 * LOSS + LOSS + 2 * (2 * MAP + KEPT) + GRAD + GRAD  # a part of three or more, its own loss
    assert got == max(8 * KEPT + 8 * MAP + inside, LOSS + 8 * (2 * MAP + KEPT) + GRAD + GRAD)


def test_kept_is_whole_for_all_stages_but_the_last() -> None:
    assert composer().kept(8, 0, [Span(0, 1)]) == 8 * 2 * KEPT
    assert composer().kept(8, 4, [Span(0, 1)]) == 4 * 2 * KEPT
    assert composer().kept(8, 0, [Span(0, 0, 2), Span(1, 1, 4)]) == 8 * KEPT + 4 * KEPT


@pytest.mark.parametrize("micro", [1, 2, 3, 5, 8])
def test_a_larger_micro_batch_never_takes_less(micro: int) -> None:
    stages = [Span(0, 1)]
    assert composer().peak(16, micro, stages) <= composer().peak(16, micro + 1, stages)


def test_a_form_is_looked_up_for_each_unit() -> None:
    asked: list[tuple[int, int]] = []

    def seen(k: int, size: int, kind: int) -> Unit:
        asked.append((k, kind))
        return unit(k, size, kind)

    Composer(2, seen, head).peak(4, 0, [Span(0, 1, 0, (1, 2))])
    assert {(0, 1), (1, 2)} <= set(asked)


OPTIONS = {"method": "memflora", "rank": 3, "sites": "all", "seed": 5, "train_head": True}
GOOD: dict[str, Any] = {"schema": "floorplan.plan/1", "options": OPTIONS, "choice": {"plan": {"micro_batch": 4}}}


def test_a_file_and_its_document_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    assert read_plan(path) == read_plan(str(path)) == read_plan(GOOD) == GOOD
    assert schedule_in(path) == {"micro_batch": 4}
    assert Plan.of(options_in(GOOD)) == Plan("memflora", Options(3, "all", 5, True))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "no floorplan.plan/1 document"),
        ({"schema": "floorplan.check/1"}, "no floorplan.plan/1 document"),
        (GOOD | {"choice": None}, "nothing fitted its budget"),
        (GOOD | {"choice": {"plan": None}}, "has no schedule"),
    ],
)
def test_what_is_no_plan(document: dict[str, Any], words: str) -> None:
    with pytest.raises(FloorplanError, match=words):
        schedule_in(document)


def test_options_are_checked() -> None:
    for options in (None, OPTIONS | {"rank": "2"}, {k: v for k, v in OPTIONS.items() if k != "seed"}):
        with pytest.raises(FloorplanError, match="its options lack one of method, rank"):
            options_in(GOOD | {"options": options})
    with pytest.raises(FloorplanError, match="method magic: not known"):
        Plan.of(options_in(GOOD | {"options": OPTIONS | {"method": "magic"}}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (broken, tmp_path / "none.json"):
        with pytest.raises(FloorplanError, match="no readable plan"):
            read_plan(path)
