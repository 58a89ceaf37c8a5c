"""The peak of any schedule of a step from numbers of its units: numbers in, numbers out.

    unit        what runs between two places where one value alone crosses; `Unit` holds its bytes at one part size
    group       consecutive units that run as one stage, in parts of one size
    down        follows the runner: whole, in parts with what crosses kept whole, last stage there and back
    ahead       the first of two passes: forward alone, outputs put together, for a loss that sees the whole batch

All figures are bytes. "owned" counts what enters a group until its last use, "held" leaves it to who holds it.
First gradients stay where they are made; later ones live until they are added.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Back:
    """Most bytes of a backward: what enters owned or held, gradients made first or added to."""

    owned_first: int = 0
    owned_later: int = 0
    held_first: int = 0
    held_later: int = 0


@dataclass(frozen=True)
class Unit:
    """One unit at one part size; `enters` is the map that it reads, 0 for the caller's own batch."""

    enters: int
    owned: int  # most of the forward, what enters included
    held: int  # the same without it
    kept: int  # what the forward leaves for the backward
    grads: int  # gradients of parameters
    back: Back | None  # None: nothing upstream of it or in it learns
    learns: bool  # what enters gets a gradient
    through: bool = False  # that gradient lies in the buffer of the one that came
    until: int = 0  # most of the forward, without what enters, while that is needed


@dataclass(frozen=True)
class Head:
    """What follows the last unit: the nodes that end the graph, and the loss.

    In the second of two passes the loss is a seed: the gradients of the outputs, which are held elsewhere.
    """

    enters: int
    alone: tuple[int, int]  # most bytes of a batch in one part: first gradients, later ones
    shared: tuple[int, int]  # the same for a part of the batch
    grads: int
    loss: int
    ahead: int = 0  # most of the forward alone
    outputs: int = 0  # what that leaves
    given: bool = False  # the gradient that the last unit gets is the seed itself


@dataclass(frozen=True)
class Whole:
    """A loss that sees the outputs of a whole batch: those put together, its most with them, and what it leaves."""

    outputs: int
    most: int
    held: int


@dataclass(frozen=True)
class Group(Unit):
    """Units of one stage at one part size, as one, and the map that it leaves."""

    leaves: int = 0


@dataclass(frozen=True)
class Span:
    """What runs as one stage of a schedule: units first .. last, in parts of `size` samples; 0: all at once.

    forms: one number a unit of the whole net, where a unit can run in several forms.
    """

    first: int
    last: int
    size: int = 0
    forms: tuple[int, ...] = ()


UnitAt = Callable[[int, int, int], Unit]  # (unit, part size, form)
HeadAt = Callable[[int, bool], Head]  # (part size, whether the loss itself follows: the part is the whole batch)
WholeAt = Callable[[int], Whole]


def sizes(n: int, size: int) -> list[tuple[int, int]]:
    """(part size, how many) of n samples in parts of `size`, full ones first."""
    size = size if 0 < size < n else n
    return [(size, n // size)] + ([(n % size, 1)] if n % size else [])


class Composer:
    """Peaks of schedules over given units."""

    def __init__(self, count: int, unit: UnitAt, head: HeadAt, whole: WholeAt | None = None) -> None:
        self.count, self.unit, self.head, self.whole = count, unit, lru_cache(None)(head), whole
        self.group = lru_cache(None)(self._group)
        self.behind = lru_cache(None)(self._behind)

    def twice(self, batch: int, micro: int, stages: Sequence[Span]) -> bool:
        """Whether a schedule takes two passes: a loss that sees the whole batch has parts before it."""
        return self.whole is not None and not _entire(batch, micro, stages)

    def peak(self, batch: int, micro: int, stages: Sequence[Span]) -> int:
        """Most bytes that a step of `batch` samples allocates at once."""
        run = tuple(stages)
        if self.whole is None or _entire(batch, micro, run):
            return self._pass(batch, micro, run)
        w, most, (full, *rest) = self.whole(batch), 0, sizes(batch, micro)
        for n, ready in [(full[0], False), *([(full[0], True)] if full[1] > 1 else []), *((n, True) for n, _ in rest)]:
            most = max(most, self._ahead(0, n, run, w.outputs if ready else 0, w.outputs))
        return max(most, w.most, w.held + self._pass(batch, micro, run))

    def _pass(self, batch: int, micro: int, run: tuple[Span, ...]) -> int:
        """Forward and backward, micro-batch by micro-batch."""
        entire = _entire(batch, micro, run)
        loss = self.head(min(batch, micro or batch), entire).loss
        most, (full, *rest) = 0, sizes(batch, micro)
        steps = [(full[0], min(before, 2), before > 0) for before in range(min(full[1], 3))]
        steps += [(rest[0][0], min(full[1], 2), True)] if rest else []
        for n, scalars, done in steps:
            most = max(most, loss * scalars + self._down(0, n, done, run, entire))
        return most

    def _group(self, first: int, last: int, size: int, forms: tuple[int, ...]) -> Group:
        units = [self.unit(first + i, size, f) for i, f in enumerate(forms)]
        leaves = self.unit(last + 1, size, 0).enters if last + 1 < self.count else self.head(size, False).enters
        owned = held = kept = 0
        for k, u in enumerate(units):
            owned = max(owned, kept + u.owned)
            held = max(held, kept + (u.owned if k else u.held))
            kept += u.kept
        back, through = _backward(units)
        grads = sum(u.grads for u in units)
        u = units[0]
        return Group(u.enters, owned, held, kept, grads, back, u.learns, through, u.until, leaves)

    def kept(self, batch: int, micro: int, stages: Sequence[Span]) -> int:
        """Most bytes that wait for the backward at once: whole stages, and one part of the last."""
        n, total = sizes(batch, micro)[0][0], 0
        for k, s in enumerate(stages):
            parts = sizes(n, s.size)
            last = k == len(stages) - 1
            total += sum(self._at(k, m, tuple(stages)).kept * (1 if last else q) for m, q in parts[: 1 if last else 2])
        return total + (self.whole(batch).held if self.whole and self.twice(batch, micro, stages) else 0)

    def _at(self, k: int, size: int, stages: tuple[Span, ...]) -> Group:
        s = stages[k]
        return self.group(s.first, s.last, size, s.forms[s.first : s.last + 1] or (0,) * (s.last + 1 - s.first))

    def _behind(self, first: int, n: int, entire: bool) -> int:
        """Gradients of unit `first` and all behind it."""
        return self.head(n, entire).grads + sum(self.unit(k, n, 0).grads for k in range(first, self.count))

    def _ahead(self, k: int, n: int, stages: tuple[Span, ...], there: int, outputs: int) -> int:
        """Stage k and all behind it, forward alone; `there`: bytes of outputs that earlier parts have begun."""
        whole, last, most, behind = self._at(k, n, stages), k == len(stages) - 1, 0, 0
        parts = list(_turns(n, stages[k].size))
        for i, (s, q) in enumerate(parts):
            g, h, ends = self._at(k, s, stages), self.head(s, False), i == len(parts) - 1
            made = (outputs if q else there) if last else there + behind
            run = max(whole.enters + g.until, g.held) if ends else whole.enters + g.held
            most = max(most, made + (g.owned if len(parts) == 1 else run))
            still = 0 if ends else whole.enters
            if last:
                most = max(most, made + still + h.ahead, outputs + still + h.outputs)
            elif len(parts) > 1:
                behind = whole.leaves
                most = max(most, there + still + g.leaves + behind)
        return most if last else max(most, self._ahead(k + 1, n, stages, there, outputs))

    def _down(self, k: int, n: int, done: bool, stages: tuple[Span, ...], alone: bool) -> int:
        size = stages[k].size
        if size <= 0 or size >= n:
            return self._whole(k, n, done, stages, alone, held=False)
        if k == len(stages) - 1:
            return self._ends(k, n, size, done, stages)
        return self._parts(k, n, size, done, stages, alone)

    def _whole(self, k: int, n: int, done: bool, stages: tuple[Span, ...], alone: bool, held: bool) -> int:
        g, all_, head = self._at(k, n, stages), self.behind(stages[k].first, n, alone), self.head(n, alone)
        most = (g.held if held else g.owned) + (all_ if done else 0)
        if k < len(stages) - 1:
            most = max(most, g.kept + self._down(k + 1, n, done, stages, alone) + (g.grads if done else 0))
        else:
            made = head.alone if alone else head.shared
            most = max(most, g.kept + made[done] + (all_ if done else 0))
        if g.back is None:
            return most
        first, later = g.back.owned_first, g.back.owned_later
        if head.given and k == len(stages) - 1:
            first, later = g.back.held_first, g.back.held_later
        after = all_ + later if done else all_ - g.grads + first
        return max(most, head.loss + after)

    def _ends(self, k: int, n: int, size: int, done: bool, stages: tuple[Span, ...]) -> int:
        whole, loss, most = self._at(k, n, stages).enters, self.head(size, False).loss, 0
        for s, q in _turns(n, size):
            most = max(most, loss * min(q, 2) + self._whole(k, s, done or q > 0, stages, False, held=True))
        return whole + most

    def _parts(self, k: int, n: int, size: int, done: bool, stages: tuple[Span, ...], alone: bool) -> int:
        whole, all_ = self._at(k, n, stages), self.behind(stages[k].first, n, alone)
        loss = self.head(min(stages[-1].size or n, n), alone).loss
        ready, most = (all_ if done else 0), 0
        for s, q in _turns(n, size):
            g, kept = self._at(k, s, stages), q * self._at(k, size, stages).kept
            most = max(most, ready + whole.enters + kept + g.held + (whole.leaves if q else 0))
            if q == 0:
                most = max(most, ready + whole.enters + g.kept + g.leaves + whole.leaves)
        kept = sum(self._at(k, s, stages).kept * times for s, times in sizes(n, size))
        most = max(most, kept + (whole.grads if done else 0) + self._down(k + 1, n, done, stages, alone))
        if whole.back is None:
            return most
        for i, (s, q) in enumerate(reversed(list(_turns(n, size, both=True)))):
            base = loss + q * self._at(k, size, stages).kept + whole.leaves
            most = max(most, base + _part(self._at(k, s, stages), whole.enters, all_, i == 0, done))
        return most


def _entire(batch: int, micro: int, stages: Sequence[Span]) -> bool:
    """Whether the loss sees the outputs of the whole batch at once."""
    return min(micro or batch, stages[-1].size or batch) >= batch


def _turns(n: int, size: int, both: bool = False) -> Iterator[tuple[int, int]]:
    """(part size, number of the part) of the parts that can be the fullest; `both`: seen from the end too."""
    (full, times), *rest = sizes(n, size)
    chosen = {0, 1, 2, times - 2, times - 1}
    yield from ((full, q) for q in sorted(q for q in chosen if 0 <= q < times))
    yield from ((s, times) for s, _ in rest)


def _part(g: Group, enters: int, grads: int, first: bool, done: bool) -> int:
    """One part's backward, of all gradients; the first makes the buffer that takes what the stage hands on."""
    assert g.back is not None
    took = enters if g.learns else 0
    if not first:
        return took + grads + g.back.held_later
    made = grads + g.back.held_later if done else grads - g.grads + g.back.held_first
    return max(made, took + grads + (0 if g.through else g.enters) if g.learns else 0)


def _backward(units: Sequence[Unit]) -> tuple[Back | None, bool]:
    """The backward of units run as one, and whether its gradient lies in the buffer that came."""
    found: list[int] = [0, 0, 0, 0]
    made, kept, through = 0, sum(u.kept for u in units), True
    for u in reversed(units):
        kept -= u.kept
        if (b := u.back) is None:
            continue
        held = (b.held_first, b.held_later) if through else (b.owned_first, b.owned_later)
        for i, v in enumerate((b.owned_first + made, b.owned_later, held[0] + made, held[1])):
            found[i] = max(found[i], kept + v)
        made += u.grads
        through = through and u.through
    return (Back(*found) if any(u.back for u in units) else None), through
