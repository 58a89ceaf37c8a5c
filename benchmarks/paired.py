"""Paired timing: every side once a round, medians of the ratios; absolute seconds are never quoted."""

import statistics
import time
from collections.abc import Callable, Mapping

from torch import Tensor, nn


def step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One forward and backward by cross entropy."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    return run


def paired(
    sides: Mapping[str, Callable[[], object]], base: str, rounds: int = 9
) -> dict[str, float]:
    """Median over rounds of each side's time divided by the base's in the same round."""
    for run in sides.values():  # warm-up: caches, thread pools, lazy kernels
        run()
        run()
    ratios: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        seconds = {}
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - start
        for name in sides:
            ratios[name].append(seconds[name] / seconds[base])
    return {name: statistics.median(r) for name, r in ratios.items()}
