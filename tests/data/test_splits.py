"""Sides of a split: by subject, place and placement, scaled by the source, no row on two."""

import numpy as np
import pytest
from recordings import series

from floorplan.data.splits import leave_place_out, leave_subject_out, make_shift, placement_split, require_disjoint
from floorplan.data.windows import Part, Recording, cut, whole
from floorplan.errors import FloorplanError


def test_a_shared_row_is_found() -> None:
    a = series(40)
    left, right = cut([Part(a, 0, 21)], 10, 5), cut([Part(a, 20, 40)], 10, 5)
    require_disjoint(cut([Part(a, 0, 20)], 10, 5), right)
    with pytest.raises(FloorplanError, match="on sides 0 and 1"):
        require_disjoint(cut([Part(a, 11, 21)], 10, 5), right)
    with pytest.raises(FloorplanError, match="row 0 of a"):
        require_disjoint(left, left)
    require_disjoint(left, cut(whole([series(40, "b")]), 10, 5))


def test_splits_by_subject_place_and_placement() -> None:
    some = [series(9, f"{s}{p}", s, p) for s in (1, 2) for p in ("ideal", "self", "mutual4", "mutual7")]

    def names(sides: tuple[list[Recording], list[Recording]]) -> tuple[list[str], list[str]]:
        return [r.name for r in sides[0]], [r.name for r in sides[1]]

    assert names(leave_subject_out(some, 2))[1] == ["2ideal", "2self", "2mutual4", "2mutual7"]
    assert all(n[0] == "1" for n in names(leave_subject_out(some, 2))[0])
    assert names(leave_place_out(some, "self"))[1] == ["1self", "2self"]
    assert len(names(leave_place_out(some, "self"))[0]) == 6
    assert names(placement_split(some)) == (["1ideal", "2ideal"], ["1self", "2self"])
    assert names(placement_split(some, target="mutual"))[1] == ["1mutual4", "1mutual7", "2mutual4", "2mutual7"]
    with pytest.raises(FloorplanError, match="8 source and 0 target"):
        leave_subject_out(some, 3)


def test_shift_is_scaled_by_the_sources_training_rows() -> None:
    shift = make_shift(whole([series(100)]), whole([series(60, "b", 2)]), 10, 5, test_stride=2)
    assert [len(w) for w in (shift.source, shift.source_test, shift.adapt, shift.test)] == [15, 6, 8, 2]
    t = np.arange(80)
    assert np.allclose(shift.scale.mean, [t.mean(), -t.mean()])
    assert np.isclose(shift.adapt.x[0, 0, 0], -t.mean() / t.std())
    assert set(shift.test.record) == {"b"} and set(shift.test.subject) == {2}
    assert shift.test.start.tolist() == [48, 50]
