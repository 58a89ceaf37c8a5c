"""The minimum cut and the divisions against every possibility, on small random graphs."""

import itertools
import random

import pytest

from floorplan.cost_models.mincut import boundaries, cheapest_cut

Graph = tuple[list[int | None], list[list[int]], list[int], list[int | None]]


def draw(seed: int) -> Graph:
    r = random.Random(seed)
    n = r.randint(2, 8)
    inputs = [sorted(r.sample(range(i), r.randint(1, min(i, 2)))) if i else [] for i in range(n)]
    sizes: list[int | None] = [
        r.choice([None, r.randint(1, 9)]) if i and r.random() < 0.3 else r.randint(0, 9) for i in range(n)
    ]
    prices: list[int | None] = [None if not i or r.random() < 0.3 else r.randint(0, 9) for i in range(n)]
    return sizes, inputs, sorted(r.sample(range(n), r.randint(1, n))), prices


def cost(kept: set[int], graph: Graph) -> tuple[int, set[int]] | None:
    """Bytes and price if exactly `kept` is kept, and what is then computed again; None if impossible."""
    sizes, inputs, needed, prices = graph
    again, todo, used = set[int](), list(needed), set[int]()
    while todo:
        v = todo.pop()
        if v in kept:
            used.add(v)
        elif v not in again:
            if prices[v] is None:
                return None
            again.add(v)
            todo += inputs[v]
    if any(sizes[v] is None for v in used):
        return None
    return sum(sizes[v] or 0 for v in used) + sum(prices[v] or 0 for v in again), again


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_cheaper(seed: int) -> None:
    graph = draw(seed)
    n = len(graph[0])
    every = [set(c) for k in range(n + 1) for c in itertools.combinations(range(n), k)]
    known = [c for c in (cost(kept, graph) for kept in every) if c is not None]
    if not known:
        with pytest.raises(ValueError, match="neither"):
            cheapest_cut(*graph)
        return
    cut = cheapest_cut(*graph)
    own = cost(set(cut.kept), graph)
    assert own == (cut.nbytes + cut.price, set(cut.recomputed))
    least = min(c for c, _ in known)
    assert own[0] == least
    assert len(cut.recomputed) == min(len(again) for c, again in known if c == least)


def test_narrow_input_is_kept_in_the_place_of_wide_maps() -> None:
    # x (4) -> z (24) -> a (24): the activation keeps z, a product keeps a
    sizes, inputs = [4, 24, 24], [[], [0], [1]]
    free = cheapest_cut(sizes, inputs, [1, 2], [None, 0, 0])
    assert (free.kept, free.recomputed, free.nbytes) == (frozenset({0}), frozenset({1, 2}), 4)
    dear = cheapest_cut(sizes, inputs, [1, 2], [None, 100, 1])
    assert (dear.kept, dear.recomputed, dear.price) == (frozenset({1}), frozenset({2}), 1)


def test_nothing_needed() -> None:
    cut = cheapest_cut([1, 2], [[], [0]], [], [None, 1])
    assert not cut.kept and not cut.recomputed and cut.nbytes == cut.price == 0


@pytest.mark.parametrize("seed", range(20))
def test_divisions_cross_the_fewest_bytes(seed: int) -> None:
    r = random.Random(seed)
    n = r.randint(1, 9)
    weights, crossing = [r.randint(0, 9) for _ in range(n)], [r.randint(0, 9) for _ in range(n)]
    limit = r.randint(max(weights), sum(weights) + 1)
    found = boundaries(weights, crossing, limit)

    def fits(cuts: tuple[int, ...]) -> bool:
        edges = [0, *cuts, n]
        parts = itertools.pairwise(edges)
        return all(b - a == 1 or sum(weights[a:b]) <= limit for a, b in parts)

    every = (c for k in range(n) for c in itertools.combinations(range(1, n), k) if fits(c))
    assert fits(tuple(found))
    assert sum(crossing[i] for i in found) == min(sum(crossing[i] for i in c) for c in every)
