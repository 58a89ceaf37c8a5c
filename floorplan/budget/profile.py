"""What the units of a step cost, from fake runs of the step cut wherever one value alone crosses.

    profiled(step, fakes)           -> Profile          one run at one part size: blocks, and where each unit begins
    linear(profiles at two sizes)   -> LinearProfile    every block a + b*m bits, checked event by event
    sized(profile, groups)          -> Sized            the numbers that cost_models.peaks composes

The head runs twice, once as a part of a batch and once as the whole of it: the share of the loss is a factor.
Of the second of two passes it starts from gradients of the outputs, and runs forward alone too, as in the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from floorplan.budget.work import Work, Worked
from floorplan.cost_models.peaks import Back, Head, Unit
from floorplan.layers.layer import model_state
from floorplan.ledger import run as ledger
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.losses import Shared, faked, trained_in, ungraded, weights_of
from floorplan.ledger.storage import StorageTracker
from floorplan.step.compile import Step
from floorplan.step.region import seeded
from floorplan.step.runner import Runner
from floorplan.step.studied import Studied
from floorplan.torch_doors import storage_key, tensors_in

Window = tuple[int, int]
FITTED = (8, 16)  # samples: multiples of 8, where packed masks fill whole bytes


@dataclass(frozen=True)
class Profile:
    """One elementary run: blocks by number, in order of birth; windows are ranges of births."""

    died: tuple[int, ...]
    nbytes: tuple[int, ...]
    what: tuple[tuple[str, str, str], ...]  # node, direction, op
    forward: tuple[Window, ...]
    head: Window
    backward: tuple[Window | None, ...]
    alone: Window  # the head again, as the whole batch
    enters: tuple[tuple[int, ...], ...]  # of each unit and of the head: the blocks that it reads
    copies: tuple[int, ...]  # what the second head reads
    grad_in: tuple[int, ...]  # of each unit: the gradient that comes, -1 for none
    grad_out: tuple[int, ...]
    grads: frozenset[int]
    loss: int
    mean: bool  # the loss is scaled by a part's share of the batch
    work: tuple[tuple[Worked, Worked], ...]  # of each unit, forward and backward; the head's last, and its forward
    ahead: Window = (0, 0)  # the head forward alone
    outputs: tuple[int, ...] = ()  # what the model returns
    seeds: tuple[int, ...] = ()  # gradients of the outputs, of a step that starts from them

    @property
    def events(self) -> tuple[Any, ...]:
        """What must not depend on the size."""
        return tuple(v for name, v in vars(self).items() if name not in ("nbytes", "mean", "work"))


@dataclass(frozen=True)
class LinearProfile:
    """A profile as a function of the part size: bits of a block = a + b*m."""

    pattern: Profile
    bits: tuple[tuple[int, int], ...]
    slopes: tuple[tuple[Worked, Worked], ...]  # work a sample
    at_size: int

    def at(self, size: int) -> Profile:
        """The run at another size."""
        nbytes = tuple(-(-(a + b * size) // 8) for a, b in self.bits)
        more, pairs = size - self.at_size, zip(self.pattern.work, self.slopes, strict=True)
        work = tuple((f.plus(df, more), b.plus(db, more)) for (f, b), (df, db) in pairs)
        return replace(self.pattern, nbytes=nbytes, work=work)


def linear(low: Profile, high: Profile, sizes: tuple[int, int]) -> LinearProfile | None:
    """The line through runs at two sizes, None where they are not the same events."""
    if low.events != high.events:
        return None
    apart, bits = sizes[1] - sizes[0], []
    for a, b in zip(low.nbytes, high.nbytes, strict=True):
        slope = 8 * (b - a) // apart
        bits.append((8 * a - slope * sizes[0], slope))
    work = tuple((a[0].slope(b[0], apart), a[1].slope(b[1], apart)) for a, b in zip(low.work, high.work, strict=True))
    return LinearProfile(low, tuple(bits), work, sizes[0])


def profiled(step: Step, fakes: Fakes) -> Profile:
    """One run of a step whose stages are all whole, on fakes of its model, inputs, weights of the loss, and target."""
    work, drivers, n = Work(), list[_Driver](), len(fakes.inputs) - 1 - len(weights_of(step.loss))

    def drive(model: nn.Module, given: tuple[Any, ...], tracker: StorageTracker) -> None:
        loss = seeded if step.loss is seeded else faked(step.loss, given[n:-1])
        runner: Runner = step.bound(model, tracker.enter, loss).__self__  # type: ignore[attr-defined]
        drivers.append(_Driver(runner, tracker, work, [*model_state(model), *trained_in(step.loss)]))
        with torch.no_grad():
            drivers[0].all(list(given[:n]), given[-1])

    with ungraded(step.loss):
        ledger.run(ledger.Step(fakes.gm, fakes.inputs, drive=drive), ledger.Watch(within=lambda _: work), fakes)
    return drivers[0].result()


class _Driver:
    """Drives the stages of a runner and notes where each begins."""

    def __init__(self, runner: Runner, tracker: StorageTracker, work: Work, state: list[Tensor]) -> None:
        self.runner, self.tracker, self.counted, self.state = runner, tracker, work, state
        self.shared, n = Shared(runner.loss, runner.mean, 0), len(runner.stages)
        self.forward: list[Window] = []
        self.backward: list[Window | None] = [None] * n
        self.enters: list[tuple[int, ...]] = []
        self.grad_in, self.grad_out = [-1] * n, [-1] * n
        self.work: list[list[Worked]] = [[Worked(), Worked()] for _ in range(n + 1)]
        self.ahead: Window = (0, 0)
        self.outputs, self.seeds = tuple[int, ...](), tuple[int, ...]()

    def _now(self) -> int:
        return len(self.tracker.timeline.lives)

    def _blocks(self, values: Sequence[Any]) -> tuple[int, ...]:
        keys = [storage_key(v) for v in values if isinstance(v, Tensor)]
        return tuple(dict.fromkeys(self.tracker.alive[k] for k in keys if k in self.tracker.alive))

    def _ahead(self, box: list[Any]) -> None:
        """The head forward alone, as the first of two passes runs it."""
        start = self._now()
        self.counted.take()
        returned = self.runner.head.outputs(box)
        self.ahead, self.outputs = (start, self._now()), self._blocks(list(tensors_in(returned)))
        self.work[-1][1] = self.counted.take()

    def _seeds(self, target: Any) -> Any:
        """A target as the head takes it: seeds with memory of their own, which goes with their last use."""
        if self.runner.loss is not seeded:
            return target
        own = [t if t is None else t.clone() for t in target]
        self.seeds = self._blocks(own)
        return own

    def all(self, box: list[Any], target: Any) -> None:
        """Forward, head, backward, and the head once more."""
        kept: list[list[Any]] = []
        for k, s in enumerate(self.runner.stages):
            self.enters.append(self._blocks(box))
            start = self._now()
            out = s.forward(box)
            box = list(out[: s.results])
            kept.append(list(out[s.results :]))
            del out
            self.forward.append((start, self._now()))
            self.work[k][0] = self.counted.take()
        self.enters.append(self._blocks(box))
        if self.runner.loss is seeded:
            self._ahead(box[:])
        shapes = [t.clone() if isinstance(t, Tensor) else t for t in box]
        self.tracker.enter("loss", "loss")
        given = [self._seeds(target)]
        start = self._now()
        self.counted.take()
        loss, *grads = self.runner.head.finish(self.shared.part, 0.5, given.pop(), box)
        self.head, self.loss = (start, self._now()), self._blocks([loss])[0]
        self.work[-1][0] = self.counted.take()
        self._return(kept, grads)
        self.grads = frozenset(self._blocks([t.grad for t in self.state if t.grad is not None]))
        self._again(shapes, target, loss)

    def _return(self, kept: list[list[Any]], grads: list[Any]) -> None:
        for k in reversed(range(len(self.runner.stages))):
            s = self.runner.stages[k]
            if not s.trains:
                return
            self.grad_in[k] = next(iter(self._blocks(grads)), -1)
            start, given = self._now(), [*grads, *kept.pop()]
            grads.clear()
            grads += s.backward(given)
            self.backward[k] = (start, self._now())
            self.grad_out[k] = next(iter(self._blocks(grads)), -1)
            self.work[k][1] = self.counted.take()

    def _again(self, box: list[Any], target: Any, loss: Tensor) -> None:
        old = [t.grad for t in self.state]
        for t in self.state:
            t.grad = None
        self.copies = self._blocks(box)
        start = self._now()
        found = self.runner.head.finish(self.shared.whole, 1.0, target, box)
        self.alone = (start, self._now())
        self.grads |= frozenset(self._blocks([t.grad for t in self.state if t.grad is not None]))
        del found, old, loss

    def result(self) -> Profile:
        """What was seen."""
        lives = self.tracker.timeline.lives
        births = [v.born for v in lives]
        died = np.searchsorted(births, [len(births) * 9 if v.died is None else v.died for v in lives])
        nbytes, what = tuple(int(v.nbytes) for v in lives), tuple((v.node, v.direction, v.op) for v in lives)
        windows = tuple(self.forward), self.head, tuple(self.backward), self.alone
        enters, came, left = tuple(self.enters), tuple(self.grad_in), tuple(self.grad_out)
        work, ends = tuple((f, b) for f, b in self.work), tuple(map(int, died))
        grads, loss, mean = self.grads, self.loss, self.shared.scaled
        found = Profile(ends, nbytes, what, *windows, enters, self.copies, came, left, grads, loss, mean, work)
        return replace(found, ahead=self.ahead, outputs=self.outputs, seeds=self.seeds)


def cuts(s: Studied) -> list[str]:
    """Nodes behind which every elementary stage ends: one value crosses, and no run of ruleless nodes is parted."""
    names = [n.name for n in s.inside]
    last = max((k for k, n in enumerate(names) if n in s.rules), default=0)
    return [n for n, after in pairwise(names[: last + 1]) if n in s.crossings and (n in s.rules or after in s.rules)]


@dataclass(frozen=True)
class Sized:
    """The units and the head at one part size, and their work."""

    units: tuple[Unit, ...]
    head: Head
    work: tuple[tuple[Worked, Worked], ...]


def joints(t: Profile) -> list[int]:
    """Stages behind which a schedule may cut: what crosses is made there and let go by the next forward."""
    found = []
    ends = [*(e for _, e in t.forward[1:]), t.head[1]]
    for k, (start, _) in enumerate(t.forward[:-1]):
        crossing = t.enters[k + 1]
        if len(crossing) == 1 and crossing[0] >= start and t.died[crossing[0]] <= ends[k]:
            found.append(k)
    return found


def sized(t: Profile, groups: Sequence[Window]) -> Sized:
    """The numbers of units, each a range first..last of stages."""
    units = tuple(_unit(t, first, last) for first, last in groups)
    work = tuple(tuple(reduce(Worked.plus, way) for way in zip(*t.work[a : b + 1], strict=True)) for a, b in groups)
    return Sized(units, _head(t), (*work, t.work[-1]))


def _curve(t: Profile, window: Window, carried: Sequence[int], later: bool) -> int:
    """Most bytes alive in a window: what is born in it and what is carried into it.

    later: a gradient is let go by the time of the next birth, for it is added to one that is there.
    """
    start, end = window
    if end <= start:
        return 0
    n = end - start
    change = np.zeros(n + 1, dtype=np.int64)
    for i in range(start, end):
        gone = t.died[i] if not (later and i in t.grads) else i + 1
        change[i - start] += t.nbytes[i]
        change[min(gone, end) - start] -= t.nbytes[i]
    for i in carried:
        change[0] += t.nbytes[i]
        change[max(0, min(t.died[i], end) - start)] -= t.nbytes[i]
    return int(np.cumsum(change)[:n].max())


def _unit(t: Profile, first: int, last: int) -> Unit:
    window = (t.forward[first][0], t.forward[last][1])
    enters = t.enters[first]
    alone, owned = _curve(t, window, (), False), _curve(t, window, enters, False)
    leaves = set(t.enters[last + 1])
    kept = [i for i in range(*window) if t.died[i] > window[1] and i not in leaves]
    starts = [w for w in t.backward[first : last + 1] if w is not None]
    back, through, learns, made = None, False, False, 0
    if starts:
        span = (starts[-1][0], starts[0][1])
        came = [t.grad_in[last]] if t.grad_in[last] >= 0 else []
        held = [_curve(t, span, kept, later) for later in (False, True)]
        back = Back(*(_curve(t, span, [*kept, *came], later) for later in (False, True)), *held)
        made = sum(t.nbytes[i] for i in t.grads if span[0] <= i < span[1])
        out = t.grad_out[first]
        learns, through = out >= 0, out >= 0 and out in came
    total = sum(t.nbytes[i] for i in kept)
    until = _curve(t, (window[0], min([window[1], *(t.died[i] for i in enters)])), (), False)
    return Unit(sum(t.nbytes[i] for i in enters), owned, alone, total, made, back, learns, through, until)


def _head(t: Profile) -> Head:
    shared = tuple(_curve(t, t.head, t.enters[-1], later) for later in (False, True))
    alone = tuple(_curve(t, t.alone, t.copies, later) for later in (False, True))
    grads = sum(t.nbytes[i] for i in t.grads if t.head[0] <= i < t.head[1])
    enters = sum(t.nbytes[i] for i in t.enters[-1])
    parts = shared if t.mean else alone
    first, outputs = _curve(t, t.ahead, t.enters[-1], False), sum(t.nbytes[i] for i in t.outputs)
    made = Head(enters, (alone[0], alone[1]), (parts[0], parts[1]), grads, t.nbytes[t.loss], first, outputs)
    return replace(made, given=t.grad_in[-1] in t.seeds)
