"""Runs the stages of a generated step: micro-batches, depth-first stages, and their gradients.

    for each micro-batch of the batch
        stage 0 .. last   each in parts of its own size; what crosses is kept whole
        head              loss and gradient of the last stage's part at once
        stage last .. 0   in reverse

Gradients are those of the whole batch: what couples samples is refused before (step_guard).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from floorplan.layers.bits import empty_like_map
from floorplan.ledger.losses import COUNTED, Loss
from floorplan.step.region import Region
from floorplan.torch_doors import tree_map

Box = list[Any]
Batch = tuple[int, float]  # samples of the whole batch, and how many of their targets count; 0: no matter


@dataclass(frozen=True)
class Stage:
    """forward(box) -> results and what is kept; backward(box of gradients and kept) -> gradients."""

    forward: Callable[[Box], tuple[Any, ...]]
    backward: Callable[[Box], tuple[Any, ...]]
    results: int
    learns: bool  # its arguments need gradients
    trains: bool  # it has a backward at all


@dataclass(frozen=True)
class Runner:
    """`sizes` is the part size of each stage, `micro` that of the whole step; 0: all at once."""

    stages: Sequence[Stage]
    head: Region
    sizes: Sequence[int]
    micro: int
    loss: Loss
    mean: bool  # the loss is a mean over samples, not a sum
    at: Callable[[str, str], None] | None = None  # told when the head begins

    @torch.no_grad()
    def step(self, inputs: Sequence[Any], target: Any) -> Tensor:
        """Fill .grad with the gradients of the loss on the whole batch; returns the loss."""
        n = _samples(inputs)
        total: Tensor | None = None
        parts = bool(self.micro or any(self.sizes))
        count = COUNTED[self.loss][1](target) if parts and self.loss in COUNTED else 0.0
        for part in _parts(n, self.micro):
            box = [sliced(a, part, n) for a in inputs]
            value = self._down(0, box, sliced(target, part, n), (n, count))[0]
            total = value if total is None else total.add_(value)
        assert total is not None
        return total

    def _down(self, k: int, box: Box, target: Any, batch: Batch) -> tuple[Tensor, list[Any]]:
        """Stage k and all behind it: the loss, and the gradients of its arguments."""
        n, s = _samples(box), self.stages[k]
        size = self.sizes[k]
        if size <= 0 or size >= n:
            return self._whole(k, box, target, batch)
        if k == len(self.stages) - 1:
            return self._ends(k, box, target, batch, size)
        whole, kept = _Assembled(n), []
        args = box[:]
        box.clear()
        for part in _parts(n, size):
            out = s.forward([sliced(a, part, n) for a in args])
            kept.append(out[s.results :])
            whole.put(part, out[: s.results])
            del out
        del args
        loss, grads = self._down(k + 1, whole.box(), target, batch)
        back = _Assembled(n)
        for part in reversed(_parts(n, size)):
            out = s.backward([*(sliced(g, part, n) for g in grads), *kept.pop()]) if s.trains else ()
            back.put(part, out)
            del out
        return loss, back.box()

    def _whole(self, k: int, box: Box, target: Any, batch: Batch) -> tuple[Tensor, list[Any]]:
        s, n = self.stages[k], _samples(box)
        out = s.forward(box)
        kept, results = list(out[s.results :]), list(out[: s.results])
        del out
        if k < len(self.stages) - 1:
            loss, grads = self._down(k + 1, results, target, batch)
        else:
            if self.at is not None:
                self.at("loss", "loss")
            loss, *grads = self.head.finish(*self._share(n, batch), target, results)
        if not s.trains:
            return loss, []
        given = [*grads, *kept]
        del grads, kept
        return loss, list(s.backward(given))

    @property
    def part_loss(self) -> Loss:
        """The loss of a part of the batch: a sum where the mean counts its targets."""
        return COUNTED[self.loss][0] if self.loss in COUNTED else self.loss

    def _share(self, n: int, batch: Batch) -> tuple[Loss, float]:
        """The loss of n samples, and what to multiply it by."""
        size, count = batch
        if n == size:
            return self.loss, 1.0
        return self.part_loss, 1 / count if count else n / size if self.mean else 1.0

    def _ends(self, k: int, box: Box, target: Any, batch: Batch, size: int) -> tuple[Tensor, list[Any]]:
        """The last stage in parts, forward and backward at once; a part's gradient takes its own place."""
        n, s = _samples(box), self.stages[k]
        args, total = box[:], None
        box.clear()
        back = _Assembled(n, [a for a in args if k > 0] if s.learns else [])
        for part in _parts(n, size):
            value, grads = self._whole(k, [sliced(a, part, n) for a in args], sliced(target, part, n), batch)
            total = value if total is None else total.add_(value)
            back.put(part, grads)
            del grads
        assert total is not None
        return total, back.box()


class _Assembled:
    """Tensors put together from parts of the batch, in the layout of the parts or in given buffers."""

    def __init__(self, n: int, into: list[Any] | None = None) -> None:
        self.n, self.into, self.tensors = n, into or [], list[Any]()

    def put(self, part: slice, values: Sequence[Any]) -> None:
        """Copy a part in."""
        for j, v in enumerate(values):
            if j == len(self.tensors):
                self.tensors.append(self._buffer(j, v))
            self.tensors[j][part].copy_(v)

    def _buffer(self, j: int, v: Tensor) -> Tensor:
        shape = (self.n, *v.shape[1:])
        if j < len(self.into) and self.into[j].shape == shape and self.into[j].dtype == v.dtype:
            return self.into[j]  # type: ignore[no-any-return]
        return empty_like_map(v, shape)

    def box(self) -> Box:
        """The tensors, handed over."""
        out, self.tensors, self.into = self.tensors, [], []
        return out


def _samples(values: Sequence[Any]) -> int:
    return next(int(v.shape[0]) for v in values if isinstance(v, Tensor) and v.dim())


def _parts(n: int, size: int) -> list[slice]:
    size = size if 0 < size < n else n
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def sliced(tree: Any, part: slice, n: int) -> Any:
    """A part of the batch of whatever has the batch, n samples; the rest as it is."""

    def cut(v: Any) -> Any:
        return v[part] if isinstance(v, Tensor) and v.dim() and v.shape[0] == n else v

    return tree if part == slice(0, n) else tree_map(cut, tree)


__all__ = ["Runner", "Stage"]
