"""What an allocator makes of requested bytes: rounding rules, and CUDA's caching allocator simulated.

    peak(intervals, rounding) = max over time of the rounded bytes alive

Intervals are (born, died, bytes), alive in [born, died); deaths at a step come before its births.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from floorplan.errors import FloorplanError

Interval = tuple[int, int, int]
MIB = 1 << 20
SMALL = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from here on a request gets a segment of its own size
ROUND_SEGMENT = 2 * MIB


def exact(n: int) -> int:
    """As requested."""
    return n


def cuda_round(n: int) -> int:
    """The next multiple of 512 bytes; nothing for nothing."""
    return aligned(n, 512)


def aligned(n: int, alignment: int) -> int:
    """The next multiple of `alignment` bytes."""
    return -(-n // alignment) * alignment


def peak(intervals: Sequence[Interval], rounding: Callable[[int], int] = exact) -> int:
    """Most rounded bytes alive at once."""
    now = best = 0
    for born, i in _events(intervals):
        now += rounding(intervals[i][2]) * (1 if born else -1)
        best = max(best, now)
    return best


def cuda_caching(intervals: Sequence[Interval]) -> tuple[int, int]:
    """(peak allocated, peak reserved) bytes of PyTorch's CUDA caching allocator, on one stream and from empty.

    Rules as PyTorch documents them ("Memory management" in its CUDA notes; head of CUDACachingAllocator.cpp),
    with default settings: requests are rounded to 512 bytes; at most 1 MiB comes from the small pool's 2 MiB
    segments, up to 10 MiB from 20 MiB segments, more gets a segment rounded to 2 MiB. The smallest free
    block that fits is used, the lowest of equals; what is left over is split off if it is 512 bytes (small
    pool) or more than 1 MiB (large pool), and otherwise counts as allocated. A freed block joins its free
    neighbours. Segments are kept. Not simulated: running out of memory, other streams, graphs, expandable segments.
    """
    heap, held = _Heap(), {}
    for born, i in _events(intervals):
        if born and intervals[i][2]:
            held[i] = heap.take(cuda_round(intervals[i][2]))
        elif not born and intervals[i][2]:
            heap.give(held.pop(i))
    return heap.most, heap.reserved


def _events(intervals: Sequence[Interval]) -> Iterator[tuple[bool, int]]:
    """(born or died, interval) in order of time."""
    for i, (born, died, n) in enumerate(intervals):
        if died < born or n < 0:
            raise FloorplanError(
                f"allocator: block {i}: {n} bytes alive from {born} to {died}; bytes and lifetimes are not negative"
            )
    real = [(i, born, died) for i, (born, died, _) in enumerate(intervals) if died > born]
    for _, born, i in sorted([(d, False, i) for i, _, d in real] + [(b, True, i) for i, b, _ in real]):
        yield born, i


@dataclass(eq=False)
class _Piece:
    """A block of a segment, with its neighbours in it."""

    address: int
    size: int
    small: bool
    used: bool = False
    before: "_Piece | None" = None
    after: "_Piece | None" = None


@dataclass
class _Heap:
    """Two pools of free blocks, each in order of (size, address)."""

    allocated: int = 0
    most: int = 0
    reserved: int = 0
    free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    at: dict[int, _Piece] = field(default_factory=dict)  # free blocks by address

    def take(self, size: int) -> _Piece:
        """Best fit, or a new segment; the front of it."""
        small = size <= SMALL
        found = bisect_left(self.free[small], (size, 0))
        if found < len(self.free[small]):
            piece = self.at.pop(self.free[small].pop(found)[1])
        else:
            # segments lie apart, so that blocks of two of them never look like neighbours
            piece = _Piece(2 * self.reserved, segment_size(size), small)
            self.reserved += piece.size
        rest = piece.size - size
        if rest >= 512 if small else rest > SMALL:
            left = _Piece(piece.address + size, rest, small, before=piece, after=piece.after)
            if piece.after:
                piece.after.before = left
            piece.size, piece.after = size, left
            self._release(left)
        piece.used = True
        self.allocated += piece.size
        self.most = max(self.most, self.allocated)
        return piece

    def give(self, piece: _Piece) -> None:
        """Free a block and join it with free neighbours."""
        self.allocated -= piece.size
        piece.used = False
        if piece.before and not piece.before.used:
            self._forget(piece.before)
            piece = self._join(piece.before, piece)
        if piece.after and not piece.after.used:
            self._forget(piece.after)
            piece = self._join(piece, piece.after)
        self._release(piece)

    def _join(self, low: _Piece, high: _Piece) -> _Piece:
        low.size, low.after = low.size + high.size, high.after
        if high.after:
            high.after.before = low
        return low

    def _release(self, piece: _Piece) -> None:
        insort(self.free[piece.small], (piece.size, piece.address))
        self.at[piece.address] = piece

    def _forget(self, piece: _Piece) -> None:
        pool = self.free[piece.small]
        del pool[bisect_left(pool, (piece.size, piece.address)) : bisect_left(pool, (piece.size, piece.address + 1))]
        del self.at[piece.address]


def segment_size(size: int) -> int:
    """What is asked of the device for a rounded request that no free block fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else aligned(size, ROUND_SEGMENT)
