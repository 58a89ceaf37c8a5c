"""Seconds of a step: rates of this machine by kind of operation, fitted to few real steps of the model.

    seconds = scale * sum over kinds of max(flops / F, bytes / M) + calls * overhead

F and M come from machine.by_kind; scale and overhead are set by real steps of 2k and 8k samples, k up to 4 where
steps are quick, and what the model then misses at 4k samples is its stated error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from floorplan.budget.work import Amount, Worked
from floorplan.cost_models.roofline import Fitted, Machine

Machines = Mapping[str, Fitted]
TimeOf = Callable[[str, Amount], float]
FITTED, CHECKED = (2, 8), 4  # samples, times `_times`; a BatchNorm that trains needs two
QUICK = 0.1  # seconds of a step that is worth more samples
SECONDS = 1.5  # for all repetitions of a program


@dataclass(frozen=True)
class Clock:
    """Machines as they run one program, and what they miss of a real step of it; None if none was run."""

    machines: Machines
    error: float | None = None

    def __call__(self, kind: str, amount: Amount) -> float:
        """Seconds of an amount of work of one kind."""
        rates = [self.machines[k].machine for k in dict.fromkeys((kind, "all")) if k in self.machines]
        return max(m.op_time(*amount) for m in rates)  # few samples of a kind may fit any rate that is high enough


def anchored(known: Machines, work: Callable[[int], Worked], step: Callable[[int], Callable[[], Tensor]]) -> Clock:
    """The clock of a program: work(n) and step(n) are of n samples, step(n)() runs."""
    bare = Clock({k: replace(f, machine=replace(f.machine, overhead_s=0.0)) for k, f in known.items()})
    k = _times(step(FITTED[0]))
    low, seen, high = _quickest([step(k * n) for n in (FITTED[0], CHECKED, FITTED[1])])
    few, many = (work(k * n) for n in FITTED)
    first, last = few.seconds(bare), many.seconds(bare)
    scale = (high - low) / (last - first) if high > low and last > first else 1.0
    scale = min(scale, low / first if first > 0 else scale)  # no call takes less than nothing
    calls = sum(v[2] for v in few.by_kind.values())
    overhead = max(low - scale * first, 0.0) / max(calls, 1.0)

    def fitted(f: Fitted) -> Fitted:
        return replace(f, machine=Machine(f.machine.flops_per_s / scale, f.machine.bytes_per_s / scale, overhead))

    clock = Clock({k: fitted(f) for k, f in known.items()})
    return replace(clock, error=abs(work(k * CHECKED).seconds(clock) / seen - 1))


def _clock(step: Callable[[], Tensor]) -> Callable[[], float]:
    """CPU time where the step runs on one, which other processes leave alone; else wall time."""
    return time.process_time if step().device.type == "cpu" else time.perf_counter


def _times(step: Callable[[], Tensor]) -> int:
    """How many times more samples a step should have to last: few samples are all overhead."""
    took, tick = [], _clock(step)
    for _ in range(2):
        start = tick()
        step().detach().sum().item()
        took.append(tick() - start)
    return max(1, min(4, int(QUICK / min(took))))


def _quickest(steps: Sequence[Callable[[], Tensor]]) -> list[float]:
    """Seconds of the fastest call of each, smallest step first, in turns: what slows them down comes and goes."""
    tick = _clock(steps[0])
    best, end, rounds = [float("inf")] * len(steps), time.perf_counter() + SECONDS, 0
    while rounds < 2 or (time.perf_counter() < end and rounds < 20):
        for i, step in enumerate(steps):
            start = tick()
            step().detach().sum().item()  # waits for an accelerator too
            best[i] = min(best[i], tick() - start)
        rounds += 1
    return [min(best[i:]) for i in range(len(best))]  # fewer samples never take longer


def error_of(clocks: list[Clock]) -> str:
    """What the model of time misses, in words."""
    known = [c.error for c in clocks if c.error is not None]
    if not known:
        return "by given rates; no real step was run to check them"
    return f"fitted to real steps of few and of four times as many samples, misses one between by {max(known):.0%}"
