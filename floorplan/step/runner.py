"""Runs the stages of a generated step: micro-batches, depth-first stages, and their gradients.

    for each micro-batch of the batch
        stage 0 .. last   each in parts of its own size; what crosses is kept whole
        head              loss and gradient of the last stage's part at once
        stage last .. 0   in reverse

A loss that parts cannot share out takes two passes (GradCache, arXiv 2101.06983):

    all forward, outputs alone kept -> loss of the whole batch, its gradient by the outputs -> all again, from there

Gradients are those of the whole batch: what couples samples is refused before (samples.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from floorplan.errors import FloorplanError
from floorplan.layers.bits import empty_like_map
from floorplan.ledger.losses import Loss, Named, Shared, as_loss
from floorplan.step.region import Region, seeded
from floorplan.torch_doors import FakeTensor, map_tensors, tensors_in

Box = list[Any]


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
    mean: bool | None = None  # the user says that the loss is a mean over samples (or a sum); None: nobody does
    at: Callable[[str, str], None] | None = None  # told when the head begins
    few: bool = False  # of alike micro-batches those alone that can be the fullest: on fakes

    def __post_init__(self) -> None:
        """A loss of torch is known by itself, in a step that was written to a file too."""
        object.__setattr__(self, "loss", as_loss(self.loss))

    @torch.no_grad()
    def step(self, inputs: Sequence[Any], target: Any) -> Tensor:
        """Fill .grad with the gradients of the loss on the whole batch; returns the loss."""
        n = _samples(inputs)
        size = head_size(n, self.micro, self.sizes[-1])
        if size < n and needs_whole(self.loss, self.mean):
            return self._twice(inputs, target, n)
        count = None
        if size < n and isinstance(self.loss, Named):
            if self.loss.name != "sum" and (not isinstance(target, Tensor) or target.shape[:1] != (n,)):
                raise FloorplanError(f"the target of a loss by name has one row a sample; give a tensor of {n} rows")
            count = self.loss.counted(target, size)
        return self._once(inputs, target, Shared(self.loss, self.mean, n, count))

    def _once(self, inputs: Sequence[Any], target: Any, loss: Shared) -> Tensor:
        """Micro-batch by micro-batch, forward and backward."""
        total: Tensor | None = None
        for part in self._micros(loss.size):
            box = [sliced(a, part, loss.size) for a in inputs]
            value = self._down(0, box, sliced(target, part, loss.size), loss)[0]
            total = value if total is None else total.add_(value)
        assert total is not None
        return total

    def _twice(self, inputs: Sequence[Any], target: Any, n: int) -> Tensor:
        """Outputs first, the loss of the whole batch, and all once more from its gradient, with the same draws."""
        draws, outputs = _Draws(inputs), Outputs(n)
        start = draws.now()
        for part in self._micros(n):
            self._ahead(0, [sliced(a, part, n) for a in inputs], outputs)
        drawn = draws.now()
        if self.at is not None:
            self.at("loss", "loss")
        value, grads = outputs.loss(Shared(self.loss, self.mean, n).whole, target, self.head)
        after = draws.now()
        draws.go_on(start)
        replace(self, loss=seeded, mean=False)._once(inputs, grads, Shared(seeded, False, n))
        if any(not torch.equal(a, b) for a, b in zip(draws.now(), drawn, strict=True)):
            raise FloorplanError("the second pass drew other random numbers than the first; use the whole batch")
        draws.go_on(after)
        return value

    def _micros(self, n: int) -> list[slice]:
        found = _parts(n, self.micro)
        return [*found[:3], *found[-2:]] if self.few and len(found) > 5 else found

    def _ahead(self, k: int, box: Box, outputs: "Outputs") -> None:
        """Stage k and all behind it, forward alone."""
        n, s, last = _samples(box), self.stages[k], k == len(self.stages) - 1
        args, whole = box[:], _Assembled(n)
        box.clear()
        for part in _parts(n, self.sizes[k]):
            given = [sliced(a, part, n) for a in args]
            if part.stop == n:
                args.clear()
            out = list(s.forward(given)[: s.results])
            if last:
                outputs.put(self.head.outputs(out))
            elif part == slice(0, n):
                whole.tensors = out
            else:
                whole.put(part, out)
            del out
        if not last:
            self._ahead(k + 1, whole.box(), outputs)

    def _down(self, k: int, box: Box, target: Any, loss: Shared) -> tuple[Tensor, list[Any]]:
        """Stage k and all behind it: the loss, and the gradients of its arguments."""
        n, s = _samples(box), self.stages[k]
        size = self.sizes[k]
        if size <= 0 or size >= n:
            return self._whole(k, box, target, loss)
        if k == len(self.stages) - 1:
            return self._ends(k, box, target, loss, size)
        whole, kept = _Assembled(n), []
        args = box[:]
        box.clear()
        for part in _parts(n, size):
            out = s.forward([sliced(a, part, n) for a in args])
            kept.append(out[s.results :])
            whole.put(part, out[: s.results])
            del out
        del args
        value, grads = self._down(k + 1, whole.box(), target, loss)
        back = _Assembled(n)
        for part in reversed(_parts(n, size)):
            out = s.backward([*(sliced(g, part, n) for g in grads), *kept.pop()]) if s.trains else ()
            back.put(part, out)
            del out
        return value, back.box()

    def _whole(self, k: int, box: Box, target: Any, loss: Shared) -> tuple[Tensor, list[Any]]:
        s, n = self.stages[k], _samples(box)
        out = s.forward(box)
        kept, results = list(out[s.results :]), list(out[: s.results])
        del out
        if k < len(self.stages) - 1:
            value, grads = self._down(k + 1, results, target, loss)
        else:
            if self.at is not None:
                self.at("loss", "loss")
            run, factor = (loss.whole, 1.0) if n == loss.size else (loss.part, loss.factor(n))
            value, *grads = self.head.finish(run, factor, target, results)
        if not s.trains:
            return value, []
        given = [*grads, *kept]
        del grads, kept
        return value, list(s.backward(given))

    def _ends(self, k: int, box: Box, target: Any, loss: Shared, size: int) -> tuple[Tensor, list[Any]]:
        """The last stage in parts, forward and backward at once; a part's gradient takes its own place."""
        n, s = _samples(box), self.stages[k]
        args, total = box[:], None
        box.clear()
        back = _Assembled(n, [a for a in args if k > 0] if s.learns else [])
        for part in _parts(n, size):
            value, grads = self._whole(k, [sliced(a, part, n) for a in args], sliced(target, part, n), loss)
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


class Outputs:
    """What the model returns for a whole batch, put together part by part, and the loss of it."""

    def __init__(self, n: int) -> None:
        self.like, self.rows, self.whole = None, 0, _Assembled(n)

    def put(self, out: Any) -> None:
        """The next samples' outputs."""
        found = [t.detach() for t in tensors_in(out)]
        if not self.rows:
            self.like = map_tensors(lambda t: t.new_empty(0), out)
        part = slice(self.rows, self.rows + len(found[0]))
        self.whole.put(part, found)
        self.rows = part.stop

    def loss(self, run: Loss, target: Any, head: Region) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and its gradient by every output; None for those that are no real numbers."""
        like, args = self.like, self.whole.box()

        def rebuilt(_: Any, *outs: Tensor) -> Any:
            left = iter(outs)
            return map_tensors(lambda _: next(left), like)

        real = [t.is_floating_point() or t.is_complex() for t in args]
        value, *grads = Region(rebuilt, None, real, head.anchor).finish(run, 1.0, target, args)
        left: Iterator[Tensor] = iter(grads)
        return value, [next(left) if r else None for r in real]


class _Draws:
    """The random numbers of the devices that a batch lies on; fakes draw none."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        found = list(tensors_in(tuple(inputs)))
        fake = any(isinstance(t, FakeTensor) for t in found)
        self.devices = [] if fake else list(dict.fromkeys(t.device for t in found if t.device.type != "cpu"))
        self.cpu = not fake

    def now(self) -> list[Tensor]:
        """Where each generator stands."""
        more = [torch.get_device_module(d).get_rng_state(d) for d in self.devices]
        return [torch.get_rng_state(), *more] if self.cpu else []

    def go_on(self, states: list[Tensor]) -> None:
        """From where they stood."""
        if self.cpu:
            torch.set_rng_state(states[0])
        for d, state in zip(self.devices, states[1:], strict=True) if self.cpu else ():
            torch.get_device_module(d).set_rng_state(state, d)


def head_size(n: int, micro: int, last: int) -> int:
    """How many of n samples the loss sees at once."""
    return min(micro or n, last or n, n)


def needs_whole(loss: Loss, mean: bool | None) -> bool:
    """Whether a loss must see the outputs of a whole batch: nobody knows how its parts add up."""
    return not loss.adds_up if isinstance(loss, Named) else mean is None


def _samples(values: Sequence[Any]) -> int:
    return next(int(v.shape[0]) for v in tensors_in(tuple(values)) if v.dim())


def _parts(n: int, size: int) -> list[slice]:
    size = size if 0 < size < n else n
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def sliced(tree: Any, part: slice, n: int) -> Any:
    """A part of the batch of whatever has the batch, n samples; the rest as it is."""

    def cut(v: Tensor) -> Tensor:
        return v[part] if v.dim() and v.shape[0] == n else v

    return tree if part == slice(0, n) else map_tensors(cut, tree)


__all__ = ["Outputs", "Runner", "Stage"]
