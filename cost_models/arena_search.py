"""Where to put blocks: greedy rules, then moves of what sticks out above the bound.

skyline    lowest step of the skyline, then the first block by priority that fits under it in time
first fit  blocks in an order, each into the lowest hole that is free while it lives

Both are quick but for each there are models where it wastes 30 %, hence many priorities, and then moves:
squeaks (what ends above the bound gets a better place in the queue), noise, and swaps. All are seeded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
CLOSE = 1.0001  # to the bound: no moves are made from there on
SLACK = 1.001  # how much worse than its best a walk may go on from
PATIENCE, SWAPS = 20, 100  # skylines, first fits without a better one before a walk starts anew


@dataclass(frozen=True)
class Found:
    """Offsets and the top of the highest block; the rule that gave them."""

    offsets: list[int]
    top: int
    rule: str


@dataclass(frozen=True)
class Blocks:
    """Blocks alive in sections first .. last - 1; a section is an instant at which as many as can be are alive."""

    first: Ints
    last: Ints
    size: Ints
    sections: int

    @staticmethod
    def of(born: Sequence[int], died: Sequence[int], size: Sequence[int]) -> "Blocks":
        """Time in steps -> time in sections: two blocks meet in one exactly if they meet in the other."""
        n = len(born)
        events = sorted([(t, 0, i) for i, t in enumerate(died)] + [(t, 1, i) for i, t in enumerate(born)])
        first, last = np.zeros(n, np.int64), np.zeros(n, np.int64)
        section, grew = 0, False
        for _, birth, i in events:
            if birth:
                first[i], grew = section, True
                continue
            section, grew = section + grew, False
            last[i] = section
        return Blocks(first, last, np.array(size, np.int64), section)

    @property
    def live(self) -> Ints:
        """Alive in each section."""
        change = np.zeros(self.sections + 1, np.int64)
        np.add.at(change, self.first, self.size)
        np.add.at(change, self.last, -self.size)
        return np.cumsum(change)


def search(blocks: Blocks, work: int) -> Found:
    """The lowest placement found with about `work` placements of a block; every greedy rule is tried in any case."""
    if not len(blocks.size):
        return Found([], 0, "nothing to place")
    bundles = bundle(blocks)
    best, starts = _greedy(bundles.blocks)
    bound, best = int(blocks.live.max()), bundles.spread(best)
    if best.top > bound:
        alone, _ = _greedy(blocks)
        best = alone if alone.top < best.top else best
        greedy = 2 * len(orders(blocks)) * (len(blocks.size) + len(bundles.members))
        best = _improve(blocks, bundles, best, starts, work - _cost(greedy, blocks))
    return best


def _cost(placements: int, blocks: Blocks) -> int:
    return int(placements * (1 + len(blocks.size) / 4000))  # a placement looks at all blocks


def _greedy(blocks: Blocks) -> tuple[Found, list[Ints]]:
    """The best of all greedy rules, and the three orders that made the lowest skylines."""
    bound, tried, best = int(blocks.live.max()), [], None
    for name, order in orders(blocks).items():
        low = skyline(blocks, order)
        tried.append((low[1], name, order))
        for rule, (offsets, top) in (("skyline", low), ("first fit", first_fit(blocks, order))):
            best = best if best and best.top <= top else Found(offsets, top, f"{rule}, {name}")
        if best and best.top == bound:
            break
    assert best is not None
    return best, [order for _, _, order in sorted(tried, key=lambda t: t[0])[:3]]


def _improve(blocks: Blocks, bundles: "Bundles", best: Found, starts: Sequence[Ints], work: int) -> Found:
    """Let the walks take turns until one is close to the bound or the work is done."""
    bound, tied = int(blocks.live.max()), bundles.blocks
    walks = [(_squeaks(tied, start, seed), True) for seed, start in enumerate(starts)]
    walks += [(_noise(tied, 3), True), (_noise(blocks, 4), False), (_swaps(tied, starts, 5), True)]
    for walk, bundled in cycle(walks):
        if work <= 0 or best.top <= bound * CLOSE:
            break
        found, cost = next(walk)
        work -= _cost(cost, blocks)
        if found.top < best.top:
            best = bundles.spread(found) if bundled else found
    return best


@dataclass(frozen=True)
class Bundles:
    """Blocks that live and die together, as one: fewer to place, and mostly for the better."""

    blocks: Blocks
    members: list[list[int]]
    sizes: list[int]

    def spread(self, found: Found) -> Found:
        """Offsets of the members, one after another in their bundle."""
        offsets = [0] * len(self.sizes)
        for at, members in zip(found.offsets, self.members, strict=True):
            for i in members:
                offsets[i], at = at, at + self.sizes[i]
        return Found(offsets, found.top, found.rule)


def bundle(blocks: Blocks) -> Bundles:
    """Tie together what has the same sections."""
    together: dict[tuple[int, int], list[int]] = {}
    for i, sections in enumerate(zip(blocks.first.tolist(), blocks.last.tolist(), strict=True)):
        together.setdefault(sections, []).append(i)
    members = list(together.values())
    heads = [m[0] for m in members]
    size = np.array([blocks.size[m].sum() for m in members], np.int64)
    tied = Blocks(blocks.first[heads], blocks.last[heads], size, blocks.sections)
    return Bundles(tied, members, blocks.size.tolist())


def orders(blocks: Blocks) -> dict[str, Ints]:
    """Who goes first."""
    first, last, size = blocks.first, blocks.last, blocks.size
    life, at = last - first, int(blocks.live.argmax())
    off_peak = ~((first <= at) & (last > at))
    area = size * life
    return {
        "bytes x lifetime": np.lexsort((first, -area)),
        "bytes x sqrt(lifetime)": np.lexsort((first, -size * np.sqrt(life))),
        "lifetime": np.lexsort((-size, -life)),
        "bytes": np.lexsort((first, -size)),
        "peak first, lifetime": np.lexsort((-size, -life, off_peak)),
        "peak first, bytes": np.lexsort((-life, -size, off_peak)),
        "peak first, bytes x lifetime": np.lexsort((first, -area, off_peak)),
        "time": np.lexsort((-size, first)),
        "time of death": np.lexsort((-size, -last)),
    }


def skyline(blocks: Blocks, order: Ints) -> tuple[list[int], int]:
    """Offsets and top: raise the lowest step by the first block in `order` that lives within it, or level it."""
    first, last = blocks.first[order], blocks.last[order]
    ids, begin, end, size = (list(map(int, a)) for a in (order, first, last, blocks.size[order]))
    edges, levels = [0, blocks.sections], [0]  # step k: sections edges[k] .. edges[k + 1] - 1, at levels[k]
    offsets, left, top = [0] * len(ids), len(ids), 0
    while left:
        level = min(levels)
        k = levels.index(level)
        lo, hi = edges[k], edges[k + 1]
        fits = first >= lo
        fits &= last <= hi
        j = int(fits.argmax())
        if fits[j]:
            offsets[ids[j]], raised = level, level + size[j]
            first[j], left, top = -1, left - 1, max(top, raised)
            steps = [(lo, level)] * (lo < begin[j]) + [(begin[j], raised)] + [(end[j], level)] * (end[j] < hi)
            edges[k : k + 1] = [s for s, _ in steps]
            levels[k : k + 1] = [h for _, h in steps]
        else:
            levels[k] = min(levels[max(k - 1, 0) : k] + levels[k + 1 : k + 2])
        _merge(edges, levels, k)
    return offsets, top


def _merge(edges: list[int], levels: list[int], k: int) -> None:
    """Join equal neighbours among steps k - 1 .. k + 3."""
    for i in range(min(k + 3, len(levels) - 1), max(k - 1, 0), -1):
        if levels[i] == levels[i - 1]:
            del levels[i], edges[i]


def first_fit(
    blocks: Blocks, order: Sequence[int] | Ints, known: Sequence[int] = (), start: int = 0, most: int | None = None
) -> tuple[list[int], int]:
    """Offsets and top; blocks before `start` of the order keep their `known` offsets.

    With `most`, gives up above it: the offsets are then unfinished and the top is more than `most`.
    """
    m, ids = len(order), [int(i) for i in order]
    offsets = list(known) or [0] * m
    table = np.zeros((4, m), np.int64)  # first, last, bottom, top of what is placed, lowest bottom first
    placed = np.array(sorted(ids[:start], key=offsets.__getitem__), np.int64)
    bottoms = np.array([offsets[i] for i in placed], np.int64)
    table[:, :start] = blocks.first[placed], blocks.last[placed], bottoms, bottoms + blocks.size[placed]
    top = int(table[3, :start].max(initial=0))
    for k in range(start, m):
        i = ids[k]
        first, last, size = blocks.first[i], blocks.last[i], int(blocks.size[i])
        at = _hole(table[:, :k], first, last, size)
        offsets[i], top = at, max(top, at + size)
        if most is not None and top > most:
            break
        p = int(table[2, :k].searchsorted(at))
        table[:, p + 1 : k + 1] = table[:, p:k].copy()
        table[:, p] = first, last, at, at + size
    return offsets, top


def _hole(table: Ints, first: int, last: int, size: int) -> int:
    """The lowest offset at which `size` is free in all sections first .. last - 1."""
    meets = ((table[0] < last) & (table[1] > first)).nonzero()[0]
    if not len(meets):
        return 0
    bottoms = table[2][meets]
    if bottoms[0] >= size:
        return 0
    tops = np.maximum.accumulate(table[3][meets])
    holes = (bottoms[1:] - tops[:-1] >= size).nonzero()[0]
    return int(tops[holes[0]] if len(holes) else tops[-1])


Walk = Iterator[tuple[Found, int]]  # placements found, and the work each took


def _squeaks(blocks: Blocks, order: Ints, seed: int) -> Walk:
    """Skylines; half of what ends above the bound moves to random earlier places in the queue."""
    draw, bound = Random(seed), int(blocks.live.max())
    queue, kept = [int(i) for i in order], [int(i) for i in order]
    best, since, above = 0, 0, [0]
    while True:
        offsets, top = skyline(blocks, np.array(queue))
        yield Found(offsets, top, "skyline, queue mended"), len(queue)
        best, since = (top, 0) if not best or top < best else (best, since + 1)
        if top <= best * SLACK:
            kept, above = queue, [k for k, i in enumerate(queue) if offsets[i] + blocks.size[i] > bound]
        if since > PATIENCE:
            kept, above, best = [int(i) for i in order], [], 0
        queue = list(kept)
        for k in [k for k in above if draw.random() < 0.5]:
            queue.insert(int(k * draw.random()), queue.pop(k))


def _noise(blocks: Blocks, seed: int) -> Walk:
    """Skylines by bytes^a x lifetime^b, blurred; every other one takes what is alive at the peak first."""
    draw, n = Random(seed), len(blocks.size)
    size, life = np.log(blocks.size), np.log(blocks.last - blocks.first)
    at = int(blocks.live.argmax())
    peak = (blocks.first <= at) & (blocks.last > at)
    for blur, peak_first in cycle([(0.1, 0), (0.4, 1), (1.0, 0), (0.1, 1), (0.4, 0), (1.0, 1)]):
        a, b = 2 * draw.random(), 2 * draw.random()
        blurred = np.array([draw.random() for _ in range(n)]) * 4 * blur
        key = a * size + b * life + blurred + 1e6 * peak * peak_first
        offsets, top = skyline(blocks, np.argsort(-key, kind="stable"))
        yield Found(offsets, top, "skyline, random"), n


def _swaps(blocks: Blocks, orders: Sequence[Ints], seed: int) -> Walk:
    """First fits; a block that ends at the top goes before one that it meets, or two that it meets change places."""
    draw, n, since, queue = Random(seed), len(blocks.size), SWAPS, [0]
    starts, offsets, top = cycle(orders), [0], 0
    while True:
        if since == SWAPS:
            low = skyline(blocks, next(starts))[0]
            queue = sorted(range(n), key=lambda i: (low[i], blocks.first[i]))
            (offsets, top), since = first_fit(blocks, queue), 0
        trial, at = _swapped(blocks, queue, offsets, top, draw)
        moved, reached = first_fit(blocks, trial, offsets, at, top)
        since = 0 if reached < top else since + 1
        if reached <= top:
            queue, offsets, top = trial, moved, reached
        yield Found(offsets, top, "first fit, queue mended"), n - at


def _swapped(blocks: Blocks, queue: list[int], offsets: list[int], top: int, draw: Random) -> tuple[list[int], int]:
    """Another queue, and the first place where it differs."""
    high = draw.choice([i for i in queue if offsets[i] + blocks.size[i] == top])
    meets = (blocks.first < blocks.last[high]) & (blocks.last > blocks.first[high])
    near = [k for k, i in enumerate(queue) if meets[i]]
    trial, k = list(queue), queue.index(high)
    if draw.random() < 0.5:
        low = draw.choice([j for j in near if j <= k])
        trial.insert(low, trial.pop(k))
        return trial, low
    low, other = sorted((draw.choice(near), draw.choice(near)))
    trial[low], trial[other] = trial[other], trial[low]
    return trial, low
