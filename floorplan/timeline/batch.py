"""The timeline of a step as a function of the batch, and of the rank: a few fake runs give every coefficient.

    bytes of a block    ceil((a + b*B) / 8), a and b in bits: packed masks need the ceil, all else is whole bytes
    peak(B)             the maximum of few lines, constant + slope*B
    with the rank       a and b are linear in r

Only shapes decide what is allocated, so one form holds wherever the step makes the same storages in the
same order, which is checked on a batch of its own. A batch of 1 is run by itself: layouts are ambiguous there,
and torch may choose other kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx

from floorplan.errors import FloorplanError
from floorplan.ledger.losses import Loss
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.timeline.run import predict_timeline
from floorplan.torch_doors import tree_map

FITTED = (8, 16)  # multiples of 8, where packed masks fill whole bytes
CHECKED = 5
Form = tuple[int, int]  # constant, and what a sample adds


class Line(NamedTuple):
    """One line of the peak: bytes = constant + slope*B at an event; eighths of a byte come from packed masks."""

    constant: float
    slope: float
    event: int
    node: str
    direction: str


@dataclass(frozen=True)
class BatchTimeline:
    """A step's blocks with their bits and dimensions as forms in the batch."""

    pattern: StepTimeline  # at the first fitted batch: node, op, events, role
    bits: tuple[Form, ...]
    shapes: tuple[tuple[Form, ...], ...]
    state: tuple[Form, ...]  # bytes of what stands apart
    alone: StepTimeline | None = None  # the step of one sample, where it is another than the forms say

    def at(self, batch: int) -> StepTimeline:
        """The timeline of one step of `batch` samples."""
        if batch < 1:
            raise FloorplanError(f"timeline: a batch of {batch} is no step; give 1 or more")
        if batch == 1 and self.alone is not None:
            return self.alone
        found = zip(self.pattern.blocks, self.bits, self.shapes, strict=True)
        blocks = tuple(
            replace(b, nbytes=_up(_at(bits, batch)), shape=tuple(_dim(d, b, bits, batch) for d in shape))
            for b, bits, shape in found
        )
        names = [name for name, _ in self.pattern.state]
        state = tuple((n, _at(f, batch)) for n, f in zip(names, self.state, strict=True))
        return replace(self.pattern, blocks=blocks, state=state)

    def peak(self, batch: int) -> int:
        """The requested peak of a step of `batch` samples, in bytes."""
        return self.at(batch).peak

    def total(self, batch: int) -> int:
        """The same with everything counted."""
        return self.at(batch).total

    def peak_lines(self) -> list[Line]:
        """The lines whose maximum is the peak, but of a step that is `alone`; exact at multiples of 8.

        At other batches each packed mask alive adds less than a byte: `peak` counts these.
        """
        bits = np.array(self.bits, dtype=np.int64).reshape(-1, 2)
        change = np.zeros((self.pattern.events + 1, 2), dtype=np.int64)
        np.add.at(change, [b.born for b in self.pattern.blocks], bits)
        np.subtract.at(change, [b.died for b in self.pattern.blocks], bits)
        live = np.cumsum(change[:-1], axis=0)
        return [self._line(event, *map(int, live[event])) for event in _envelope(live)]

    def _line(self, event: int, constant: int, slope: int) -> Line:
        b = self.pattern.blocks[event]
        return Line(_in_bytes(constant), _in_bytes(slope), event, b.node, b.direction)


@dataclass(frozen=True)
class RankTimeline:
    """A step at two ranks; what lies between and beyond follows in a straight line."""

    ranks: tuple[int, int]
    low: BatchTimeline
    high: BatchTimeline

    def at_rank(self, rank: int) -> BatchTimeline:
        """The step of a model adapted at `rank`, as a function of the batch."""
        low, high = self.low, self.high
        forms = (self._between(getattr(low, k), getattr(high, k), rank) for k in ("bits", "shapes", "state"))
        found = BatchTimeline(low.pattern, *forms)
        found = replace(found, pattern=found.at(FITTED[0]))
        if low.alone is None and high.alone is None:
            return found
        return replace(found, alone=self._step(low.at(1), high.at(1), rank))

    def _between(self, a: Any, b: Any, rank: int) -> Any:
        if isinstance(a, tuple):
            return tuple(self._between(x, y, rank) for x, y in zip(a, b, strict=True))
        return a + (b - a) * (rank - self.ranks[0])  # the ranks differ by one

    def _step(self, a: StepTimeline, b: StepTimeline, rank: int) -> StepTimeline:
        blocks = tuple(
            replace(x, **{k: self._between(getattr(x, k), getattr(y, k), rank) for k in ("nbytes", "shape")})
            for x, y in zip(a.blocks, b.blocks, strict=True)
        )
        sizes = self._between(tuple(n for _, n in a.state), tuple(n for _, n in b.state), rank)
        return replace(a, blocks=blocks, state=tuple((k, n) for (k, _), n in zip(a.state, sizes, strict=True)))


def in_batch(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    target: Tensor,
    loss: Loss,
    *,
    replays: bool = False,
    optimizer: str | None = None,
    name: str = "",
) -> BatchTimeline:
    """The step as a function of the batch, from four fake runs; the inputs' own batch does not matter.

    FloorplanError names the first storage that does not fit the form.
    """

    def run(batch: int) -> StepTimeline:
        sized = tree_map(lambda t: sized(t, batch), tuple(inputs))
        labels = sized(target, batch)
        return predict_timeline(gm, sized, labels, loss, replays=replays, optimizer=optimizer, name=name)

    low, high, other = (run(batch) for batch in (*FITTED, CHECKED))
    _same_events(low, high, *(f"batch {b}" for b in FITTED))
    _same_events(low, other, *(f"batch {b}" for b in (FITTED[0], CHECKED)))
    fitted = BatchTimeline(
        low,
        tuple(_form(8 * a.nbytes, 8 * b.nbytes) for a, b in zip(low.blocks, high.blocks, strict=True)),
        tuple(tuple(map(_form, a.shape, b.shape)) for a, b in zip(low.blocks, high.blocks, strict=True)),
        tuple(_form(a, b) for (_, a), (_, b) in zip(low.state, high.state, strict=True)),
    )
    _same_sizes(fitted.at(CHECKED), other, f"batch {CHECKED}")
    try:
        one = run(1)
    except FloorplanError:  # a BatchNorm that has no statistics of one value
        return fitted
    return fitted if one == fitted.at(1) else replace(fitted, alone=one)


def in_rank(
    models: Mapping[int, fx.GraphModule], inputs: Sequence[Any], target: Tensor, loss: Loss, **options: Any
) -> RankTimeline:
    """The step as a function of batch and rank, from one model adapted at two ranks next to each other."""
    ranks = tuple(sorted(models))
    if len(ranks) != 2 or ranks[1] - ranks[0] != 1:
        raise FloorplanError(f"timeline: ranks {list(ranks)} were given; give two that differ by one, such as 2 and 3")
    low, high = (in_batch(models[r], inputs, target, loss, **options) for r in ranks)
    _same_events(low.pattern, high.pattern, *(f"rank {r}" for r in ranks))
    if low.alone is not None or high.alone is not None:
        _same_events(low.at(1), high.at(1), *(f"rank {r}" for r in ranks))
    return RankTimeline((ranks[0], ranks[1]), low, high)


def _form(a: int, b: int) -> Form:
    """The form through the values at both fitted batches; what divides unevenly shows at the third."""
    slope = (b - a) // (FITTED[1] - FITTED[0])
    return a - slope * FITTED[0], slope


def _at(form: Form, batch: int) -> int:
    return form[0] + form[1] * batch


def _up(bits: int) -> int:
    return -(-bits // 8)


def _in_bytes(bits: int) -> float:
    return bits // 8 if bits % 8 == 0 else bits / 8


def _packed(b: Block, bits: Form) -> bool:
    return b.dtype == "uint8" and len(b.shape) == 1 and bool(bits[0] % 8 or bits[1] % 8)


def _dim(d: Form, b: Block, bits: Form, batch: int) -> int:
    return _up(_at(bits, batch)) if _packed(b, bits) else _at(d, batch)


def _envelope(live: Any) -> list[int]:
    """Events whose line is the largest at some whole batch of 1 or more, in order of the batch."""
    if not len(live):
        return []
    constant, slope = live[:, 0], live[:, 1]
    batch, events = 1, []
    while True:
        value = constant + slope * batch
        best = np.flatnonzero(value == value.max())
        events.append(int(best[np.argmax(slope[best])]))  # the one that stays largest
        c, s = constant[events[-1]], slope[events[-1]]
        steeper = slope > s
        if not steeper.any():
            return events
        batch = int(((c - constant[steeper]) // (slope[steeper] - s)).min()) + 1


def _same_events(a: StepTimeline, b: StepTimeline, one: str, two: str) -> None:
    for x, y in zip(a.blocks, b.blocks, strict=False):
        if _what(x) != _what(y):
            raise FloorplanError(
                f"timeline: {x.node or '-'} ({x.direction}): event {x.born} is {x.op} at {one}, {y.op} of "
                f"{y.node or '-'} ({y.direction}) at {two}; no one form holds, predict each size by itself"
            )
    if a.events != b.events:
        raise FloorplanError(
            f"timeline: {a.events} storages at {one}, {b.events} at {two}; no one form holds, "
            "predict each size by itself"
        )


def _what(b: Block) -> tuple[Any, ...]:
    return b.born, b.died, b.node, b.direction, b.op, b.dtype, b.role, len(b.shape)


def _same_sizes(fitted: StepTimeline, run: StepTimeline, where: str) -> None:
    for x, y in zip(fitted.blocks, run.blocks, strict=True):
        if (x.nbytes, x.shape) != (y.nbytes, y.shape):
            raise FloorplanError(
                f"timeline: {y.node or '-'} ({y.direction}): {y.op} makes {y.nbytes} bytes at {where} where a straight "
                f"line gives {x.nbytes}; no one form holds, predict each size by itself"
            )
