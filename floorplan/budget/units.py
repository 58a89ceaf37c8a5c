"""The numbers that cost_models.peaks composes, from a profile: units between the places where one value crosses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from floorplan.budget.profile import Profile, Window
from floorplan.budget.work import Worked
from floorplan.cost_models.peaks import Back, Head, Unit


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
    return Unit(sum(t.nbytes[i] for i in enters), owned, alone, total, made, back, learns, through)


def _head(t: Profile) -> Head:
    shared = tuple(_curve(t, t.head, t.enters[-1], later) for later in (False, True))
    alone = tuple(_curve(t, t.alone, t.copies, later) for later in (False, True))
    grads = sum(t.nbytes[i] for i in t.grads if t.head[0] <= i < t.head[1])
    enters = sum(t.nbytes[i] for i in t.enters[-1])
    parts = shared if t.mean else alone
    return Head(enters, (alone[0], alone[1]), (parts[0], parts[1]), grads, t.nbytes[t.loss])
