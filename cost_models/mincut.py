"""Which values to keep and which to compute again: numbers in, numbers out.

    cost = bytes of what is kept + price of what is computed again        least, by one minimum cut

Value v is split in two, `in -> out` with v's bytes as capacity: cutting there keeps v. If `in` falls on
the side of the needed values instead, v is computed again: the edge from the source, v's price, is cut,
and v's inputs are needed in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx

SOURCE, SINK = "source", "sink"


@dataclass(frozen=True)
class Cut:
    """Numbers of the values kept, of those computed again, and the bytes and the price of both."""

    kept: frozenset[int]
    recomputed: frozenset[int]
    nbytes: int
    price: int


def cheapest_cut(
    sizes: Sequence[int | None], inputs: Sequence[Sequence[int]], needed: Sequence[int], prices: Sequence[int | None]
) -> Cut:
    """The cheapest way to have every needed value; among equals, the one that computes least again.

    sizes: bytes of each value, None if it cannot be kept. inputs: the values it is computed from.
    prices: in bytes, None if it cannot be computed again. ValueError where a value can be had in no way.
    """
    graph = nx.DiGraph()
    todo, seen = list(needed), set(needed)
    graph.add_nodes_from((SOURCE, SINK))
    for v in needed:
        graph.add_edge(("out", v), SINK)
    while todo:
        v = todo.pop()
        graph.add_edge(("in", v), ("out", v), **_capacity(sizes[v]))
        graph.add_edge(SOURCE, ("in", v), **_capacity(prices[v]))
        for u in inputs[v] if prices[v] is not None else ():
            graph.add_edge(("out", u), ("in", v))
            if u not in seen:
                seen.add(u)
                todo.append(u)
    try:
        _, (_, near) = nx.minimum_cut(graph, SOURCE, SINK)  # networkx gives the smallest side at the sink
    except nx.NetworkXUnbounded as e:
        raise ValueError("a needed value can neither be kept nor be computed again") from e
    again = frozenset(v for v in seen if ("in", v) in near)
    kept = frozenset(v for v in seen if ("out", v) in near) - again
    return Cut(kept, again, sum(sizes[v] or 0 for v in kept), sum(prices[v] or 0 for v in again))


def _capacity(n: int | None) -> dict[str, int]:
    """An edge without a capacity is never cut."""
    return {} if n is None else {"capacity": n}


def boundaries(weights: Sequence[int], crossing: Sequence[int], limit: int) -> list[int]:
    """Where to divide a sequence so that the values that cross the divisions have the fewest bytes.

    weights: bytes needed of each element; no part exceeds `limit`, one element apart. crossing[i]: bytes
    that cross a division before element i. Returns the first element of every part but the first.
    """
    n = len(weights)
    upto = list(accumulate(weights, initial=0))
    best: list[tuple[int, int]] = [(0, 0)]  # bytes crossing so far, the division before this one
    for j in range(1, n + 1):
        own = crossing[j] if j < n else 0
        starts = [i for i in range(j) if i == j - 1 or upto[j] - upto[i] <= limit]
        best.append(min((best[i][0] + own, i) for i in starts))
    found, j = list[int](), n
    while j:
        j = best[j][1]
        found.append(j)
    return sorted(x for x in found if x)
