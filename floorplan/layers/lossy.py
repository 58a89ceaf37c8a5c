"""LOSSY: smooth activations that keep a few bits of their derivative. Never used unless asked for.

    y  = act(z)               exact
    gz = g * level(z)         level: the nearest of 2**bits values to act'(z);  keeps its number, `bits` bits

What is returned for the gradient differs from the true one by at most `error_bound` times |g|. The levels
are the best for z drawn from N(0, 1) ("normal") or those of the smallest bound ("minimax"); where the
nearest level changes, the edges in z, is found by bisection, so the forward only compares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.layers import bits as packing
from floorplan.layers import levels as fit_levels
from floorplan.layers.activations import ACTIVATIONS, NAMED, options_of, record_of
from floorplan.layers.bits import flat_view, format_of, pack_by_shifts, unpack_by_shifts
from floorplan.layers.functions import CompactFunction, by_sample, call, learns
from floorplan.layers.layer import Layer
from floorplan.layers.levels import Floats

FITS = ("normal", "minimax")
SMOOTH = {a.name: a.derivative for a in ACTIVATIONS.values() if a.derivative}
_STORED = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
_SAMPLE = 1024  # quantiles of N(0, 1) that the levels are fitted to
_ROUNDING = 2.0**-18  # what float32 may add to the error of a level


@dataclass(frozen=True)
class Table:
    """z <= edges[0] has levels[codes[0]], z in (edges[i-1], edges[i]] has levels[codes[i]]."""

    edges: tuple[float, ...]
    codes: tuple[int, ...]
    levels: tuple[float, ...]
    error_bound: float  # most that a level differs from the derivative


@cache
def table(name: str, options: tuple[tuple[str, Any], ...], bits: int, fit: str, single: bool) -> Table:
    """The levels of an activation's derivative and where they change; `single`: edges are float32 numbers."""
    derivative, reach, jumps = SMOOTH[name](**dict(options))
    kind = np.float32 if single else np.float64
    grid = _grid(reach, jumps, kind)
    values = derivative(grid)
    low, high = float(values.min()), float(values.max())
    if fit == "minimax":
        levels = fit_levels.minimax(low, high, 2**bits)
    else:
        normal = NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / _SAMPLE) for i in range(_SAMPLE)])
        levels = fit_levels.least_squares(derivative(z), 2**bits)
    between = (levels[1:] + levels[:-1]) / 2

    def nearest(z: Floats) -> Any:
        return np.searchsorted(between, derivative(z))

    edges = _edges(nearest, grid, kind)
    inside = [edges[0] - 1.0, *(edges[:-1] + edges[1:]) / 2, edges[-1] + 1.0] if len(edges) else [0.0]
    bound = fit_levels.largest_error(levels, low, high) + _ROUNDING
    codes = tuple(int(c) for c in nearest(np.array(inside)))
    return Table(tuple(map(float, edges)), codes, tuple(map(float, levels)), bound)


def _grid(reach: float, jumps: tuple[float, ...], kind: Any) -> Floats:
    """Numbers of type `kind` so close that a level is never skipped; every jump lies between neighbours."""
    even = np.linspace(-1.0, 1.0, 8001)
    at = np.array(jumps, dtype=kind)
    around = [at, np.nextafter(at, kind(-np.inf)), np.nextafter(at, kind(np.inf))]
    return np.unique(np.concatenate([(even * reach).astype(kind), even.astype(kind), *around])).astype(np.float64)


def _edges(nearest: Callable[[Floats], Any], grid: Floats, kind: Any) -> Floats:
    """Every last number of type `kind` before the nearest level changes."""
    lo = grid.astype(kind)
    changes = np.nonzero(np.diff(nearest(lo.astype(np.float64))))[0]
    lo, hi = lo[changes], lo[changes + 1]
    first = nearest(lo.astype(np.float64))
    while True:
        middle = ((lo.astype(np.float64) + hi.astype(np.float64)) / 2).astype(kind)
        open_ = (middle > lo) & (middle < hi)
        if not open_.any():
            return np.unique(lo).astype(np.float64)
        same = nearest(middle.astype(np.float64)) == first
        lo, hi = np.where(open_ & same, middle, lo), np.where(open_ & ~same, middle, hi)


@torch.library.custom_op("floorplan::pack_levels", mutates_args=())
def pack_levels(z: Tensor, edges: list[float], codes: list[int], bits: int) -> Tensor:
    """Numbers of the levels of z, any shape -> uint8 (ceil(numel*bits/8),), in z's memory order."""
    layout = packing.layout_of(z)
    flat = flat_view(packing.as_layout(z.detach(), layout), layout)
    out = packing.bytes_for(flat.numel(), bits, z.device)
    step = packing.CPU_SEGMENT if z.device.type == "cpu" else packing.SEGMENT
    kind = torch.float64 if z.dtype == torch.float64 else torch.float32
    bounds = torch.tensor(edges, dtype=kind, device=z.device)
    numbers = torch.tensor(codes, dtype=torch.uint8, device=z.device)
    for i in range(0, flat.numel(), step):
        found = numbers[torch.bucketize(flat[i : i + step].to(kind), bounds, out_int32=True)]
        out[i * bits // 8 : (i * bits + found.numel() * bits + 7) // 8] = pack_by_shifts(found, bits)
    return out


@pack_levels.register_fake
def _(z: Tensor, edges: list[float], codes: list[int], bits: int) -> Tensor:
    return packing.bytes_for(z.numel(), bits, z.device)


@torch.library.custom_op("floorplan::apply_levels", mutates_args=())
def apply_levels(g: Tensor, packed: Tensor, levels: list[float], bits: int, layout: int) -> Tensor:
    """A new tensor like g, dense in `layout`: g times the level whose number is packed."""
    source, out = packing.source_and_target(g, layout)
    given, into = flat_view(source, layout), flat_view(out, layout)
    step = packing.CPU_SEGMENT if g.device.type == "cpu" else packing.SEGMENT
    factors = torch.tensor(levels, dtype=g.dtype, device=g.device)
    for i in range(0, given.numel(), step):
        part = given[i : i + step]
        bytes_ = packed[i * bits // 8 : (i * bits + part.numel() * bits + 7) // 8]
        torch.mul(part, factors[unpack_by_shifts(bytes_, part.numel(), bits).int()], out=into[i : i + step])
    return out


@apply_levels.register_fake
def _(g: Tensor, packed: Tensor, levels: list[float], bits: int, layout: int) -> Tensor:
    return torch.empty_like(g, memory_format=format_of(g, layout))


by_sample(pack_levels, apply_levels)


class LossyActivation(Layer):
    """LOSSY: nn.`name`, exact forward, whose gradient is g times one of 2**bits levels. Any shape."""

    stored = "floorplan.lossy.LossyActivation"
    pillar = "activation"
    lossy = True

    def __init__(self, name: str, bits: int, options: dict[str, Any] | None = None, fit: str = "normal") -> None:
        super().__init__()
        if name not in SMOOTH:
            raise ValueError(f"LossyActivation: {name} is not known; use one of {', '.join(SMOOTH)}")
        if isinstance(bits, bool) or bits not in _STORED:
            raise ValueError(f"LossyActivation: {bits} bits; use 1 to 8")
        if fit not in FITS:
            raise ValueError(f"LossyActivation: fit {fit} is not known; use {' or '.join(FITS)}")
        self.name, self.bits, self.options, self.fit = name, bits, dict(options or {}), fit
        self.act = NAMED[name].kind(**self.options)

    @classmethod
    def of(cls, module: nn.Module, bits: int, fit: str = "normal") -> "LossyActivation | str":
        """The lossy twin of an activation, or why it has none."""
        if (a := record_of(module)) is None or a.derivative is None:
            return f"{type(module).__name__} has no few-bit derivative; known are {', '.join(SMOOTH)}"
        return cls(type(module).__name__, bits, options_of(module), fit).train(module.training)

    def plain_form(self) -> nn.Module:
        return self.act

    @property
    def packed_bits(self) -> float:
        return float(self.stored_bits)

    def table(self, dtype: torch.dtype) -> Table:
        """Edges and levels for inputs of this dtype."""
        single = dtype != torch.float64
        return table(self.name, tuple(sorted(self.options.items())), self.bits, self.fit, single)

    @property
    def stored_bits(self) -> int:
        """Bits an element that are kept: 3 take the room of 4, 5 to 7 that of 8."""
        return _STORED[self.bits]

    @property
    def error_bound(self) -> float:
        """Most that the gradient may differ from the true one, as a share of the incoming one."""
        return self.table(torch.float32).error_bound

    def extra_repr(self) -> str:
        room = f" (stored as {self.stored_bits})" if self.stored_bits != self.bits else ""
        return f"LOSSY gradient, bits={self.bits}{room}, |error| <= {self.error_bound:.4g} |g|, fit={self.fit}"

    def forward(self, z: Tensor) -> Tensor:
        """act(z), out of place."""
        return call(_Lossy, z, self) if learns(z) else self.act(z)


class _Lossy(CompactFunction):
    """act(z) that keeps the numbers of the levels of its derivative."""

    layer = "LossyActivation"

    @staticmethod
    def formula(z: Tensor, layer: LossyActivation) -> Tensor:
        why = "LossyActivation: an approximate gradient has no further derivative"
        raise FloorplanError(f"{why}; rewrite without --lossy-bits, or take one gradient, in reverse mode")

    @staticmethod
    def forward(ctx: Any, z: Tensor, layer: LossyActivation) -> Tensor:
        t = layer.table(z.dtype)
        ctx.layout, ctx.bits, ctx.levels = packing.layout_of(z), layer.stored_bits, list(t.levels)
        ctx.save_for_backward(pack_levels(z, list(t.edges), list(t.codes), ctx.bits))
        return layer.act(z)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return apply_levels(g, packed, ctx.levels, ctx.bits, ctx.layout), None
