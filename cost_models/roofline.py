"""Step time as a calibrated roofline, with the error it makes on what it was calibrated with.

    seconds = max(flops / F, bytes / M) + calls * overhead

F, M and the overhead are fitted to measured operations; no more is claimed than the errors stated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from floorplan.errors import FloorplanError

Sample = tuple[float, float, float, float]  # flops, bytes moved, calls, seconds


@dataclass(frozen=True)
class Machine:
    """What a machine does, as one sees it from its operations."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float  # of one call

    def op_time(self, flops: float, moved: float, calls: float = 1) -> float:
        """Seconds of `calls` operations that do `flops` and move `moved` bytes together."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s) + calls * self.overhead_s


@dataclass(frozen=True)
class Fitted:
    """A machine and |predicted / measured - 1| over the samples that it was fitted to."""

    machine: Machine
    median_error: float
    worst_error: float
    samples: int = 0


def fit(samples: Sequence[Sample]) -> Fitted:
    """The machine with the least sum of |log(predicted / measured)|: a few odd samples do not move it.

    A coarse grid in the logarithms of the three figures, then ever finer ones around the best point.
    """
    if len(samples) < 3 or any(s <= 0 or c <= 0 or f < 0 or b < 0 for f, b, c, s in samples):
        raise FloorplanError(
            f"roofline: {len(samples)} samples; give three or more (flops, bytes, calls, seconds) with positive seconds"
        )
    if not any(f for f, *_ in samples) or not any(b for _, b, *_ in samples):
        raise FloorplanError("roofline: no sample has flops, or none moves bytes; measure operations of both kinds")
    flops, moved, calls, seconds = np.array(samples, float).T
    best = np.array([(flops / seconds).max(), (moved / seconds).max(), (seconds / calls).min()])
    centre, reach = np.log(best) - [0.0, 0.0, 2.0], np.array([4.0, 4.0, 6.0])
    for _ in range(24):
        axes = [c + r * np.linspace(-1, 1, 9) for c, r in zip(centre, reach, strict=True)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)  # the centre is one of its points
        f, m, overhead = (np.exp(grid[:, i, None]) for i in range(3))
        loss = np.abs(np.log((np.maximum(flops / f, moved / m) + calls * overhead) / seconds)).sum(1)
        centre, reach = grid[loss.argmin()], reach * 0.65
    machine = Machine(*(float(v) for v in np.exp(centre)))
    predicted = np.array([machine.op_time(f, b, c) for f, b, c, _ in samples])
    errors = np.abs(predicted / seconds - 1)
    return Fitted(machine, float(np.median(errors)), float(errors.max()), len(samples))
