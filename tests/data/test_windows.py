"""Windows: what they hold, what label they get, and that no row is on two sides."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import series

from floorplan.data.splits import require_disjoint
from floorplan.data.windows import Part, Recording, Scale, cut, fill_missing, fit_scale, runs, time_split, whole
from floorplan.errors import FloorplanError

NAN = float("nan")


def labelled(y: list[int]) -> Recording:
    return Recording("a", np.zeros((len(y), 1), np.float32), np.array(y), 1, "p")


def test_a_window_is_its_rows() -> None:
    w = cut(whole([series(10)]), 4, 3)
    assert w.x.shape == (3, 2, 4) and w.x.dtype == np.float32 and w.x.flags.c_contiguous
    assert w.x[:, 0].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert w.x[1, 1].tolist() == [-3, -4, -5, -6]
    assert w.start.tolist() == [0, 3, 6] and w.y.dtype == np.int64 and len(w) == 3
    x, y = w.tensors()
    assert x.dtype == torch.float32 and y.dtype == torch.int64 and x.shape == (3, 2, 4)


def test_majority_counts_labelled_rows_only() -> None:
    y = [-1, -1, -1, 2] + [1, 0, 1, -1] + [-1, -1, -1, -1] + [1, 0, 0, 1]
    w = cut(whole([labelled(y)]), 4, 4)
    assert w.y.tolist() == [2, 1, 0] and w.start.tolist() == [0, 4, 12]


def test_last_row_rule() -> None:
    y = [-1, -1, -1, 2] + [1, 1, 1, -1] + [0, 0, 0, 1]
    w = cut(whole([labelled(y)]), 4, 4, rule="last")
    assert w.y.tolist() == [2, 1] and w.start.tolist() == [0, 8]


def test_missing_values() -> None:
    x = np.array([[NAN, 1, NAN], [2, NAN, NAN], [NAN, NAN, np.inf], [8, 4, NAN]], np.float32)
    assert fill_missing(x).tolist() == [[2, 1, 0], [2, 2, 0], [5, 3, 0], [8, 4, 0]]
    assert np.isnan(x[0, 0])
    whole_one = np.ones((2, 2), np.float32)
    assert fill_missing(whole_one) is whole_one


def test_missing_values_are_not_filled_across_a_split() -> None:
    x = np.array([1, 2, NAN, NAN, 100, 100], np.float32)[:, None]
    r = Recording("a", x, np.zeros(6, np.int64), 1, "p")
    first, rest = time_split(whole([r]), 0.5)
    assert first[0].x[:, 0].tolist() == [1, 2, 2] and rest[0].x[:, 0].tolist() == [100, 100, 100]


def test_scale_counts_each_row_once_and_spares_constant_channels() -> None:
    x = np.array([[0, 0.1, 5], [2, 0.1, 7], [4, 0.1, 3]], np.float32)
    r = Recording("a", x, np.zeros(3, np.int64), 1, "p")
    scale = fit_scale([Part(r, 0, 2), Part(r, 2, 3)])
    assert np.allclose(scale.mean, x.mean(0)) and np.allclose(scale.std[[0, 2]], x.std(0)[[0, 2]])
    assert scale.std[1] == 1.0
    scaled = cut(whole([r]), 3, 3).scaled(scale)
    assert np.allclose(scaled.x[0, [0, 2]].mean(1), 0, atol=1e-6)
    assert np.allclose(scaled.x[0, [0, 2]].std(1), 1, atol=1e-6)
    assert np.allclose(scaled.x[0, 1], 0, atol=1e-6)


def test_scale_of_given_numbers() -> None:
    w = cut(whole([series(2)]), 2, 1).scaled(Scale(np.array([1.0, 0.0]), np.array([2.0, 4.0])))
    assert w.x[0].tolist() == [[-0.5, 0.0], [0.0, -0.25]]


def test_runs_are_the_stretches_of_one_label() -> None:
    parts = runs([labelled([0, 0, -1, -1, 3, 3, 3, 0])])
    assert [(p.start, p.stop, int(p.y[0])) for p in parts] == [(0, 2, 0), (4, 7, 3), (7, 8, 0)]
    assert runs([labelled([-1, -1])]) == []


def test_time_split_makes_room_for_one_test_window() -> None:
    parts = whole([series(100), series(30, "b"), series(15, "c")])
    first, rest = time_split(parts, 0.8, room=10)
    assert [(p.stop, q.start, q.stop) for p, q in zip(first, rest, strict=True)] == [
        (80, 80, 100),
        (20, 20, 30),
        (12, 12, 15),
    ]


@given(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    size=st.integers(1, 12),
    stride=st.integers(1, 8),
    share=st.floats(0.05, 0.95),
)
@settings(max_examples=60, deadline=None)
def test_no_row_is_on_two_sides(rows: list[int], size: int, stride: int, share: float) -> None:
    parts = whole([series(n, str(i)) for i, n in enumerate(rows)])
    sides = time_split(parts, share, size)
    assert sum(len(p) for side in sides for p in side) == sum(rows)
    seen = []
    for side in sides:
        if any(len(p) >= size for p in side):
            w = cut(side, size, stride)
            assert (w.x[:, 0, 0] == w.start).all() and (w.x[:, 0, -1] == w.start + size - 1).all()
            seen.append(w)
    require_disjoint(*seen)
    covered = [{(r, s + k) for r, s in zip(w.record, w.start, strict=True) for k in range(size)} for w in seen]
    assert len(set().union(*covered)) == sum(map(len, covered))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cut(whole([series(5)]), 6, 1), "no labelled window of 6 rows in 1 parts"),
        (lambda: cut(whole([labelled([-1, -1])]), 2, 1), "no labelled window"),
        (lambda: cut(whole([series(5)]), 2, 0), "stride 0"),
        (lambda: cut(whole([series(5)]), 2, 1, rule="mean"), "no label rule 'mean'"),  # type: ignore[arg-type]
        (lambda: cut(whole([series(5), labelled([0, 0])]), 2, 1), r"\[1, 2\] channels"),
        (lambda: time_split([], 1.0), "share 1.0"),
        (lambda: fit_scale([]), "no rows"),
        (lambda: Recording("a", np.zeros((3, 2), np.float32), np.zeros(2, np.int64), 1, "p"), "a: rows"),
    ],
)
def test_errors_say_what_to_do(call: object, says: str) -> None:
    with pytest.raises(FloorplanError, match=says) as e:
        call()  # type: ignore[operator]
    assert "\n" not in str(e.value) and ";" in str(e.value)
