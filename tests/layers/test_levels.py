"""Levels against brute force."""

import itertools

import numpy as np
import pytest

from floorplan.layers.levels import largest_error, least_squares, minimax


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_least_squares_is_the_best_grouping(seed: int, count: int) -> None:
    x = np.sort(np.random.default_rng(seed).normal(size=9))

    def error(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, len(x)]
        return sum(float(((x[a:b] - x[a:b].mean()) ** 2).sum()) for a, b in itertools.pairwise(edges))

    best = min(error(c) for c in itertools.combinations(range(1, len(x)), count - 1))
    levels = least_squares(x, count)
    got = float((np.abs(x[:, None] - levels[None]).min(1) ** 2).sum())
    assert got == pytest.approx(best) and list(levels) == sorted(levels)


def test_more_levels_than_numbers() -> None:
    assert list(least_squares(np.array([2.0, 1.0]), 4)) == [1.0, 2.0, 2.0, 2.0]


def test_minimax() -> None:
    levels = minimax(-1.0, 3.0, 4)
    assert list(levels) == [-0.5, 0.5, 1.5, 2.5]
    assert largest_error(levels, -1.0, 3.0) == 0.5
    assert largest_error(np.array([0.0, 1.0]), -3.0, 1.5) == 3.0
