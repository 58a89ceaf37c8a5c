"""A few levels that stand for many values: numbers in, numbers out.

normal    the levels with the least mean squared error over a sample, by dynamic programming (exact)
minimax   the levels with the least largest error: the middles of equal parts of the values' range
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def least_squares(sample: Floats, count: int) -> Floats:
    """`count` levels, rising: the least mean squared distance from each value of `sample` to its nearest.

    The best groups of sorted numbers are runs of neighbours, so the best k groups of the first j numbers are
    the best k - 1 groups of the first i and one run.
    """
    x = np.sort(np.asarray(sample, dtype=np.float64))
    n = len(x)
    if count >= n:
        return np.concatenate([x, np.full(count - n, x[-1])])
    sums, squares = (np.concatenate([[0.0], np.cumsum(v)]) for v in (x, x * x))
    i, j = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    length = np.maximum(j - i, 1)
    cost = squares[None, :] - squares[:, None] - (sums[None, :] - sums[:, None]) ** 2 / length
    cost = np.where(j > i, np.maximum(cost, 0.0), np.inf)
    best, cuts = cost[0], list[NDArray[np.intp]]()
    for _ in range(count - 1):
        through = best[:, None] + cost
        cuts.append(through.argmin(axis=0))
        best = through.min(axis=0)
    ends = [n]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    edges = [0, *reversed(ends)]
    return np.array([x[a:b].mean() for a, b in zip(edges, edges[1:], strict=False)])


def minimax(low: float, high: float, count: int) -> Floats:
    """`count` levels, rising, of which one is within (high - low) / (2 count) of every value between."""
    step = (high - low) / count
    return np.asarray(low + step * (np.arange(count) + 0.5), dtype=np.float64)


def largest_error(levels: Floats, low: float, high: float) -> float:
    """The largest distance of a value between low and high to the nearest of the rising `levels`."""
    gaps = np.diff(levels) / 2
    return float(max(levels[0] - low, high - levels[-1], gaps.max(initial=0.0)))
