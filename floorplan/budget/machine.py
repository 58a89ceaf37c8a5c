"""Measure what a machine does with the operations of a training step, and fit a roofline to it.

Convolutions of the shapes that CNNs are made of, in both memory layouts, forward and input gradient; gates packed
and applied. One machine does not fit all kinds on a CPU, so there is one for each kind as well.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from floorplan.cost_models.roofline import Fitted, Sample, fit
from floorplan.errors import FloorplanError
from floorplan.layers.bits import apply_gate, pack_gate

# kind -> batch, channels in and out, side of the map
SHAPES = {
    "pointwise": ((8, 16, 96, 48), (8, 96, 24, 24), (8, 160, 320, 7), (32, 64, 64, 14)),
    "dense": ((8, 16, 16, 28), (4, 64, 64, 28), (8, 128, 128, 14), (8, 256, 256, 7)),
    "depthwise": ((8, 96, 96, 48), (8, 192, 192, 24), (16, 384, 384, 14), (32, 96, 96, 7)),
}
GATES = (1 << 14, 1 << 17, 1 << 20, 1 << 22)  # elements
WARM = 2  # calls that are not counted


@dataclass(frozen=True)
class Timed:
    """One operation and how long a call takes."""

    kind: str
    name: str
    flops: float
    moved: float  # bytes read and written
    seconds: float

    @property
    def sample(self) -> Sample:
        """For `roofline.fit`."""
        return self.flops, self.moved, 1, self.seconds


def by_kind(device: str | torch.device = "cpu", seconds: float = 3.0) -> dict[str, Fitted]:
    """A machine for each kind of operation, such as "dense, channels_last" or "pack"; "all" for any other."""
    found = timings(device, seconds)
    kinds = {t.kind: [u.sample for u in found if u.kind == t.kind] for t in found}
    return {kind: fit(samples) for kind, samples in kinds.items()} | {"all": fit([t.sample for t in found])}


def timings(device: str | torch.device = "cpu", seconds: float = 3.0) -> list[Timed]:
    """Every operation timed on `device`, in about `seconds` altogether; the fastest call of each."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise FloorplanError(f"timings: {device}: no such device here; use cpu")
    with torch.no_grad():
        ops = [*_convs(where), *_gates(where)]
        return [Timed(kind, name, f, b, _fastest(run, where, seconds / len(ops))) for kind, name, f, b, run in ops]


Work = tuple[str, str, float, float, Callable[[], object]]


def _bytes(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def _convs(device: torch.device) -> Iterator[Work]:
    for kind, batch, inputs, outputs, side in ((kind, *s) for kind, shapes in SHAPES.items() for s in shapes):
        k, groups = (1, 1) if kind == "pointwise" else (3, inputs if kind == "depthwise" else 1)
        at: Any = {"padding": k // 2, "groups": groups}
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(batch, inputs, side, side, device=device).contiguous(memory_format=layout)
            g = torch.randn(batch, outputs, side, side, device=device).contiguous(memory_format=layout)
            w = torch.randn(outputs, inputs // groups, k, k, device=device).contiguous(memory_format=layout)
            named = f"{kind}, {str(layout).removeprefix('torch.').removesuffix('_format')}"
            flops, moved = 2.0 * g.numel() * w[0].numel(), _bytes(x, g, w)
            name = f"{inputs}->{outputs} {k}x{k} on {side}"
            yield named, name, flops, moved, partial(F.conv2d, x, w, **at)
            yield named, f"{name}, input gradient", flops, moved, partial(F.conv_transpose2d, g, w, **at)


def _gates(device: torch.device) -> Iterator[Work]:
    for n in GATES:
        z = torch.randn(n, device=device)
        packed = pack_gate(z, 0.0, 6.0, False)
        both = _bytes(z, packed)
        yield "clamp", f"{n} elements", n, 2 * _bytes(z), partial(z.clamp_, 0.0, 6.0)
        yield "pack", f"{n} elements", n, both, partial(pack_gate, z, 0.0, 6.0, False)
        yield "apply", f"{n} elements", n, both + _bytes(z), partial(apply_gate, z, packed, 0, 1.0, 0.0)


def _fastest(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest call: other processes only ever add to it."""
    end, best = time.perf_counter() + seconds, math.inf
    for i in range(2000):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start) if i >= WARM else best
        if now > end and i >= WARM + 2:
            break
    return best
