"""The schedules of a step that are considered, how their parts grow, and the choice: none is run to be judged.

whole, micro-batches, one cut, two cuts, cuts inside micro-batches; units in their merged, fast or small forms
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise
from typing import Any

from floorplan.budget.model import Model
from floorplan.budget.net import Costed, Net
from floorplan.budget.profile import FITTED
from floorplan.cost_models.peaks import Span
from floorplan.ledger.inputs import resized
from floorplan.step.compile import Step
from floorplan.step.timeline import predict
from floorplan.timeline.blocks import StepTimeline

SIZES = tuple(1 << k for k in range(8))  # part sizes of stages
PAIRS = 16  # places for two cuts
STEEP = 8  # most by which part sizes grow from stage to stage
STEP = FITTED[0]
POLICIES = ("merged", "fast", "small")
ALIKE = 1.01  # times that the model does not tell apart
TRIED = 4  # schedules whose exact peak is looked at, should a closed form be off


def places(net: Net) -> list[int]:
    """Units behind which two cuts are tried: where the map is as small as any before, ends of each level."""
    least, lows = float("inf"), list[tuple[int, int]]()
    for k in range(len(net.groups) - 1):
        width = net.unit(k + 1, FITTED[0], 0).enters
        if width <= least:
            least = width
            lows.append((width, k))
    runs = [[k for _, k in run] for _, run in groupby(lows, key=lambda e: e[0])]
    return sorted({k for run in runs for k in (run[0], run[-1])})[-PAIRS:]


def uncut(net: Net, batch: int) -> Iterator[Costed]:
    """The whole batch and micro-batches, without cuts."""
    for micro in _micros(net, batch):
        for policy in POLICIES:
            stage = Span(0, len(net.groups) - 1, 0, net.forms(policy, micro or batch))
            yield net.costed(batch, micro, (stage,))


def _micros(net: Net, batch: int) -> list[int]:
    return [0] if net.coupled else [0, *(1 << k for k in range(batch.bit_length()) if 1 << k < batch)]


def schedules(net: Net, batch: int) -> Iterator[Costed]:
    """Every schedule that is considered for a batch."""
    for micro in _micros(net, batch):
        n, seen = micro or batch, set[Any]()
        for policy in POLICIES:
            for stages in _staged(net, n, policy):
                if stages not in seen:
                    seen.add(stages)
                    yield net.costed(batch, micro, stages)


def _staged(net: Net, n: int, policy: str) -> Iterator[tuple[Span, ...]]:
    last = len(net.groups) - 1
    yield (Span(0, last, 0, net.forms(policy, n)),)
    if net.coupled or n > SIZES[-1]:
        return
    some = [*(s for s in SIZES if s < n), 0]
    pairs = [(k,) for k in range(last)], combinations(places(net), 2)
    for count, at in enumerate(pairs, 2):
        chosen = [c for c in combinations(some, count) if all((b or n) <= STEEP * a for a, b in pairwise(c))]
        for where in at:
            edges = [-1, *where, last]
            for parts in chosen:
                spans = zip(pairwise(edges), parts, strict=True)
                yield tuple(Span(a + 1, b, s, net.forms(policy, s or n)) for (a, b), s in spans)


def grown(net: Net, f: Costed, room: int) -> Costed:
    """The same schedule with each part as large as fits `room`, the micro-batch first."""
    best = f
    for change in _changes(f):
        low, high = change.now(best), change.most(best)

        def fits(size: int, best: Costed = best, change: _Change = change) -> bool:
            return net.costed(best.batch, *change.to(best, size)).peak <= room

        # Multiples first: between them a profile may take a run of its own.
        eights = bisect_left(range(high // STEP), True, key=lambda k: (k + 1) * STEP > low and not fits((k + 1) * STEP))
        low, high = max(low, eights * STEP), min(high, eights * STEP + STEP - 1) if eights < high // STEP else high
        size = low + bisect_left(range(low + 1, high + 1), True, key=lambda n: not fits(n))
        if size > change.now(best):
            best = net.costed(f.batch, *change.to(best, size))
    return best


def more(net: Net, f: Costed) -> list[Costed]:
    """The same schedule with one more sample in a part, for each part that is not the whole."""
    return [net.costed(f.batch, *c.to(f, c.now(f) + 1)) for c in _changes(f) if c.now(f) < c.most(f)]


@dataclass(frozen=True)
class _Change:
    """A part size of a schedule: the micro-batch (-1) or that of a stage."""

    which: int

    def now(self, f: Costed) -> int:
        return f.micro if self.which < 0 else f.stages[self.which].size

    def most(self, f: Costed) -> int:
        return f.batch if self.which < 0 else (f.micro or f.batch)

    def to(self, f: Costed, size: int) -> tuple[int, tuple[Span, ...]]:
        if self.which < 0:
            return size if size < f.batch else 0, f.stages
        stages = list(f.stages)
        stages[self.which] = replace(stages[self.which], size=size if size < self.most(f) else 0)
        return f.micro, tuple(stages)


def _changes(f: Costed) -> list[_Change]:
    stages = [_Change(k) for k, s in reversed(list(enumerate(f.stages))) if s.size]
    return ([_Change(-1)] if f.micro else []) + stages


def smallest(m: Model, batch: int) -> Costed:
    """The schedule that allocates least: one sample at a time, or the whole batch where samples are coupled."""
    net, micro = m.net, 0 if m.net.coupled or batch == 1 else 1
    n = micro or batch
    stages = [(Span(0, len(net.groups) - 1, 0, net.forms(policy, n)),) for policy in ("merged", "small")]
    return min((net.costed(batch, micro, s) for s in stages), key=lambda f: f.peak)


def largest(m: Model, budget: int) -> int:
    """The largest batch that fits; 0 if none does."""

    def fits(b: int) -> bool:
        return smallest(m, b).peak <= m.room(budget, b)

    if not fits(1):
        return 0
    low, high = 1, max(2, (budget - m.state) // max(m.sample, 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fastest(net: Net, found: Sequence[Costed], room: int) -> Costed | None:
    """The fastest that fits, grown to its largest part sizes, the exact run asked in doubt."""
    fits = [f for f in found if f.peak <= room]
    least = min((f.seconds for f in fits), default=0.0) * ALIKE
    for f in sorted(fits, key=lambda f: (max(f.seconds, least), len(f.stages), f.peak))[:TRIED]:
        best = grown(net, f, room)
        if exact(net, best)[1].peak <= room:
            return best
    return None


def exact(net: Net, f: Costed) -> tuple[Step, StepTimeline]:
    """The compiled step of a schedule and its exact timeline on fakes; of alike micro-batches some are run."""
    if f in net.exact:
        return net.exact[f]  # type: ignore[no-any-return]
    step = net.step(net.schedule(f))
    *given, target = resized([*net.inputs, net.target], f.batch)
    net.exact[f] = found = step, predict(step, given, target, few=True)
    return found


def one_more_than(m: Model, choice: Costed, free: bool) -> int | None:
    """Least total with one more sample: in a part of the step, or in the batch where it is `free`."""
    tried = more(m.net, choice)
    if free:
        tried.append(smallest(m, choice.batch + 1))
    return min((f.peak + m.state + m.sample * f.batch for f in tried), default=None)
