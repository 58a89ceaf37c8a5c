"""Recordings cut into windows, and the statistics that scale them.

(T, C) rows, one label a row  ->  (N, C, T) windows, one label a window

Label of a window: the most frequent label among its labelled rows (the lower one if two are level), or
its last row's label. A window without a label is dropped. Missing values are filled inside the part
that a window is cut from, so that no value of the other side of a split reaches it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from floorplan.errors import FloorplanError

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Rule = Literal["majority", "last"]

UNLABELLED = -1
# Below float32's resolution a channel is constant, whatever its rounding leaves as deviation.
_CONSTANT = 1e-6


@dataclass(frozen=True, eq=False)
class Recording:
    """One series: x (T, C), NaN = missing; y (T,) labels from 0, -1 = none; `name` is unique."""

    name: str
    x: Floats
    y: Ints
    subject: int
    place: str

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1]:
            shapes = f"rows {self.x.shape} and labels {self.y.shape}"
            raise FloorplanError(f"{self.name}: {shapes} do not fit; give x (T, C) and y (T,)")


@dataclass(frozen=True, eq=False)
class Part:
    """Rows [start, stop) of a recording."""

    recording: Recording
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def x(self) -> Floats:
        """(rows, C), missing values filled from this part's own rows."""
        return fill_missing(self.recording.x[self.start : self.stop])

    @property
    def y(self) -> Ints:
        """(rows,) labels."""
        return self.recording.y[self.start : self.stop]


@dataclass(frozen=True, eq=False)
class Scale:
    """Mean and deviation of each channel, (C,) each; the deviation of a constant channel is 1."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Windows:
    """x (N, C, T), y (N,); `record` and `start` (first row) say where each window lies."""

    x: Floats
    y: Ints
    record: NDArray[np.str_]
    start: Ints
    subject: Ints

    def __len__(self) -> int:
        return len(self.y)

    def scaled(self, scale: Scale) -> "Windows":
        """The same windows with each channel less its mean, over its deviation."""
        x = self.x - scale.mean[:, None].astype(np.float32)
        x /= scale.std[:, None].astype(np.float32)
        return replace(self, x=x)

    def tensors(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """x float32 (N, C, T) and y int64 (N,) on a device."""
        return torch.tensor(self.x, device=device), torch.tensor(self.y, device=device)


def whole(recordings: Sequence[Recording]) -> list[Part]:
    """Each recording as one part."""
    return [Part(r, 0, len(r.y)) for r in recordings]


def runs(recordings: Sequence[Recording]) -> list[Part]:
    """The longest stretches of one label, in order; unlabelled rows are left out."""
    parts = []
    for r in recordings:
        edges = [0, *(np.flatnonzero(np.diff(r.y)) + 1).tolist(), len(r.y)]
        parts += [Part(r, a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a and r.y[a] != UNLABELLED]
    return parts


def time_split(parts: Sequence[Part], share: float = 0.8, room: int = 0) -> tuple[list[Part], list[Part]]:
    """The first `share` of each part's rows and the rest.

    A rest of fewer than `room` rows grows to `room` if as many stay before it.
    """
    if not 0 < share < 1:
        raise FloorplanError(f"time split: share {share} is not between 0 and 1; 0.8 is usual")
    first, rest = [], []
    for p in parts:
        kept = int(share * len(p))
        if len(p) >= 2 * room:
            kept = min(kept, len(p) - room)
        first.append(replace(p, stop=p.start + kept))
        rest.append(replace(p, start=p.start + kept))
    return [p for p in first if len(p)], [p for p in rest if len(p)]


def fill_missing(x: Floats) -> Floats:
    """Straight lines over missing values, ends held; a channel with no value is 0. x (T, C)."""
    present = np.isfinite(x)
    if present.all():
        return x
    filled, rows = x.copy(), np.arange(len(x))
    for c in np.flatnonzero(~present.all(axis=0)):
        seen = present[:, c]
        filled[:, c] = np.interp(rows, rows[seen], x[seen, c]) if seen.any() else 0.0
    return filled


def fit_scale(parts: Sequence[Part]) -> Scale:
    """Statistics of every row of the parts, each row counted once."""
    count = sum(len(p) for p in parts)
    if not count:
        raise FloorplanError("scale: no rows to take statistics of; choose other recordings")
    mean = sum(p.x.sum(axis=0, dtype=np.float64) for p in parts) / count
    std = np.sqrt(sum(((p.x - mean) ** 2).sum(axis=0) for p in parts) / count)
    return Scale(mean, np.where(std > _CONSTANT * np.abs(mean), std, 1.0))


def cut(parts: Sequence[Part], size: int, stride: int, rule: Rule = "majority") -> Windows:
    """Windows of `size` rows every `stride` rows; none crosses the edge of its part."""
    if size < 1 or stride < 1:
        raise FloorplanError(f"windows: size {size}, stride {stride}; both are at least 1")
    if rule not in ("majority", "last"):
        raise FloorplanError(f"windows: no label rule {rule!r}; use majority or last")
    channels = {p.recording.x.shape[1] for p in parts}
    if len(channels) > 1:
        raise FloorplanError(f"windows: recordings of {sorted(channels)} channels; choose the same columns for all")
    cuts = [_cut_one(p, size, stride, rule) for p in parts if len(p) >= size]
    if not sum(len(c) for c in cuts):
        none = f"no labelled window of {size} rows in {len(parts)} parts"
        raise FloorplanError(f"windows: {none}; choose a smaller size or more recordings")
    return Windows(*(np.concatenate([getattr(c, f.name) for c in cuts]) for f in fields(Windows)))


def _cut_one(part: Part, size: int, stride: int, rule: Rule) -> Windows:
    labels = sliding_window_view(part.y, size)[::stride]
    if rule == "last":
        y = labels[:, -1]
    else:
        counts = np.stack([(labels == k).sum(axis=1) for k in range(max(int(labels.max()), 0) + 1)])
        y = np.where(counts.any(axis=0), counts.argmax(axis=0), UNLABELLED)
    kept = y != UNLABELLED
    x = sliding_window_view(part.x, size, axis=0)[::stride][kept]
    record, subject = np.full(len(x), part.recording.name), np.full(len(x), part.recording.subject, dtype=np.int64)
    start = (part.start + stride * np.flatnonzero(kept)).astype(np.int64)
    return Windows(np.ascontiguousarray(x, dtype=np.float32), y[kept].astype(np.int64), record, start, subject)
