"""Paired timing: every side once a round, medians of the ratios; absolute seconds are never quoted."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

CLOCKS = (time.perf_counter, time.process_time)


@dataclass(frozen=True)
class Ratio:
    """A side's time over the base's: medians over rounds, of wall time and of CPU time of all threads."""

    wall: float
    cpu: float


def step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One forward and backward by cross entropy."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    return run


def ratios(sides: Mapping[str, Callable[[], object]], base: str, rounds: int = 9) -> dict[str, Ratio]:
    """Median over rounds of each side's time divided by the base's in the same round, by both clocks."""
    for run in sides.values():  # warm-up: caches, thread pools, lazy kernels
        run()
        run()
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        seconds = {name: _timed(run) for name, run in sides.items()}
        for name in sides:
            pairs = zip(seconds[name], seconds[base], strict=True)
            found[name].append([own / other for own, other in pairs])
    return {name: Ratio(*(statistics.median(c) for c in zip(*rows, strict=True))) for name, rows in found.items()}


def paired(sides: Mapping[str, Callable[[], object]], base: str, rounds: int = 9) -> dict[str, float]:
    """The wall time alone."""
    return {name: r.wall for name, r in ratios(sides, base, rounds).items()}


def _timed(run: Callable[[], object]) -> list[float]:
    start = [clock() for clock in CLOCKS]
    run()
    return [clock() - s for clock, s in zip(CLOCKS, start, strict=True)]
