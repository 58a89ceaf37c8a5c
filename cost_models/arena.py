"""A static arena: one offset for every block of a step, from intervals alone.

    block i: alive in [born, died), at offset[i] .. offset[i] + bytes     no two live blocks share a byte
    size >= bound = max over time of the aligned bytes alive

Placing at exactly the bound is not always possible and finding out is NP-hard; `place` tries greedy
rules and then moves what sticks out (arena_search). `verify` shares no code with the placer.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from floorplan.cost_models.arena_search import Blocks, search
from floorplan.errors import FloorplanError

Interval = tuple[int, int, int]  # born, died, bytes
RATE = 80_000  # placements that a slow core makes in a second


@dataclass(frozen=True)
class Placement:
    """Offsets in the order of the intervals, in bytes; `size` is what the arena takes."""

    offsets: tuple[int, ...]
    size: int
    bound: int  # most aligned bytes alive at once: no placement is smaller
    order: str  # the rule that gave it
    raw_bound: int = 0  # most bytes alive at once, not aligned
    alignment: int = 64

    @property
    def ratio(self) -> float:
        """size / bound; 1.0 for an arena of nothing."""
        return self.size / self.bound if self.bound else 1.0


def place(intervals: Sequence[Interval], *, alignment: int = 64, seconds: float = 5.0) -> Placement:
    """Offsets for (born, died, bytes) intervals, as low as can be found.

    `seconds` is the effort on a slow core. It is spent by counting placements, not by the clock, so
    that equal intervals get equal offsets. Blocks of no bytes or no lifetime lie at 0.
    """
    if type(alignment) is not int or alignment < 1:
        raise FloorplanError(f"arena: alignment {alignment} is not a positive number of bytes; use 64")
    _check(intervals)
    raw = _most([n for _, _, n in intervals], intervals)
    sizes = [-(-n // alignment) for _, _, n in intervals]
    real = [i for i, (born, died, n) in enumerate(intervals) if n and died > born]
    blocks = Blocks.of([intervals[i][0] for i in real], [intervals[i][1] for i in real], [sizes[i] for i in real])
    found = search(blocks, int(seconds * RATE))
    at = dict(zip(real, found.offsets, strict=True))
    offsets = [at.get(i, 0) * alignment for i in range(len(intervals))]
    bound = _most(sizes, intervals) * alignment
    return Placement(tuple(offsets), found.top * alignment, bound, found.rule, raw, alignment)


def verify(intervals: Sequence[Interval], placement: Placement) -> None:
    """FloorplanError, naming the two, if blocks alive together overlap, or any lies outside the arena.

    A sweep over time that keeps what is alive in order of address: a newcomer can only hit its neighbours.
    """
    _check(intervals)
    if len(placement.offsets) != len(intervals):
        raise FloorplanError(f"arena: {len(placement.offsets)} offsets for {len(intervals)} blocks; place them again")
    for i, ((born, died, n), at) in enumerate(zip(intervals, placement.offsets, strict=True)):
        end = at + n if died > born else at
        if at < 0 or at % placement.alignment or end > placement.size:
            room = f"{placement.size} bytes on a multiple of {placement.alignment}"
            raise FloorplanError(f"arena: block {i} at {at}: not inside {room}; place them again")
    _sweep(intervals, placement.offsets)
    rounded = [-(-n // placement.alignment) * placement.alignment for _, _, n in intervals]
    if placement.bound != _most(rounded, intervals):
        raise FloorplanError(f"arena: bound {placement.bound} is not the most that is alive; place them again")


def _sweep(intervals: Sequence[Interval], offsets: Sequence[int]) -> None:
    alive: list[tuple[int, int, int]] = []  # (start, end, block), in order of address
    for when, born, i in _events(intervals):
        entry = (offsets[i], offsets[i] + intervals[i][2], i)
        at = bisect_left(alive, entry)
        if not born:
            del alive[at]
            continue
        for start, end, other in alive[max(at - 1, 0) : at + 1]:
            if start < entry[1] and entry[0] < end:
                both = f"bytes {max(start, entry[0])} to {min(end, entry[1])} at step {when}"
                raise FloorplanError(f"arena: blocks {other} and {i}: both hold {both}; place them again")
        alive.insert(at, entry)


def _events(intervals: Sequence[Interval]) -> list[tuple[int, bool, int]]:
    """(when, born or died, block) of all that takes room; who dies at a step is gone before it."""
    real = [(i, born, died) for i, (born, died, n) in enumerate(intervals) if n and died > born]
    return sorted([(died, False, i) for i, _, died in real] + [(born, True, i) for i, born, _ in real])


def _most(sizes: Sequence[int], intervals: Sequence[Interval]) -> int:
    """Most of `sizes` alive at once."""
    now = best = 0
    for _, born, i in _events(intervals):
        now += sizes[i] if born else -sizes[i]
        best = max(best, now)
    return best


def _check(intervals: Sequence[Interval]) -> None:
    for i, (born, died, n) in enumerate(intervals):
        if died < born or n < 0:
            block = f"block {i}: {n} bytes alive from {born} to {died}"
            raise FloorplanError(f"arena: {block}; bytes and lifetimes are not negative")
