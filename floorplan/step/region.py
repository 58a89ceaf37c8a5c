"""The parts of a step that have no straight-line rule: a few nodes under autograd, with edges cut clean.

    y, tape = region.forward(x)         x enters by a node that keeps no data; the tape is y's edge in the graph
    gx = region.backward(tape, gy)      parameters accumulate in .grad as ever

What autograd keeps inside is the region's cost; nothing outside it is held.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from floorplan.layers.functions import applied
from floorplan.torch_doors import tensors_in

Tape = tuple[list[Any], list["_Slot"]]


class _Slot:
    """Where the gradient of one argument arrives."""

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.grad: Tensor | None = None

    def take(self) -> Tensor:
        """The gradient, in memory of its own; zeros if none came."""
        g, self.grad = self.grad, None
        if g is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        dense = all(st != 0 for st, n in zip(g.stride(), g.shape, strict=True) if n > 1)
        return g if dense else g.contiguous()


class _Enter(torch.autograd.Function):
    """x as an interior node of the graph; `anchor` is any tensor that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, slot: _Slot) -> Tensor:
        ctx.slot = slot
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        ctx.slot.grad = g
        return None, None, None


class _Seed(torch.autograd.Function):
    """A scalar whose gradient by some tensors is given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *outs: Tensor) -> Tensor:
        ctx.grads = grads
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.grads)


def seeded(out: Any, grads: Sequence[Tensor | None]) -> Tensor:
    """As a loss of `out` whose gradients are known: 0, for its value is not asked for."""
    pairs = [(t, g) for t, g in zip(tensors_in(out), grads, strict=True) if g is not None and t.requires_grad]
    if not pairs:
        return next(tensors_in(out)).new_zeros(())
    loss: Tensor = applied(_Seed, [g for _, g in pairs], *(t for t, _ in pairs))
    return loss


class Region:
    """Some nodes of a graph as one function; `grads` says which arguments need a gradient."""

    def __init__(
        self, run: Callable[..., Any], model: Any, grads: Sequence[bool], anchor: Callable[[], Tensor]
    ) -> None:
        self.run, self.model, self.grads, self.anchor = run, model, tuple(grads), anchor

    def _entered(self, args: Sequence[Any], slots: list[_Slot]) -> list[Any]:
        out = []
        for a, wanted in zip(args, self.grads, strict=True):
            if wanted:
                slots.append(_Slot(a))
                a = applied(_Enter, self.anchor(), a, slots[-1])
            out.append(a)
        return out

    def plain(self, *args: Any) -> tuple[Any, ...]:
        """The results alone."""
        return tuple(self.run(self.model, *args))

    def outputs(self, args: list[Any]) -> Any:
        """What the nodes that end a graph return; empties `args`."""
        given = args[:]
        args.clear()
        return self.run(self.model, *given)

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """Results, and the tape last."""
        slots: list[_Slot] = []
        with torch.enable_grad():
            out = tuple(self.run(self.model, *self._entered(args, slots)))
        learns = [isinstance(t, Tensor) and t.requires_grad for t in out]
        edges = [get_gradient_edge(t) if k else None for t, k in zip(out, learns, strict=True)]
        return (*(t.detach() if isinstance(t, Tensor) else t for t in out), (edges, slots))

    def backward(self, tape: Tape, *grads: Tensor | None) -> tuple[Tensor, ...]:
        """Gradients of the arguments that need one; None stands for a result that nobody used."""
        edges, slots = tape
        pairs = [(e, g) for e, g in zip(edges, grads, strict=True) if e is not None and g is not None]
        edges.clear()
        if pairs:
            roots, given = zip(*pairs, strict=True)
            del pairs, grads
            torch.autograd.backward(list(roots), list(given))
        return tuple(s.take() for s in slots)

    def finish(self, loss: Callable[[Any, Any], Tensor], share: float, target: Any, args: list[Any]) -> tuple[Any, ...]:
        """Loss of the whole batch's share, and gradients of the arguments; empties `args`."""
        slots: list[_Slot] = []
        with torch.enable_grad():
            entered = self._entered(args, slots)
            args.clear()
            out = self.run(self.model, *entered)
            del entered
            value = loss(out, target)
            value = value if share == 1 else value * share
            out = None
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
        return (value.detach(), *(s.take() for s in slots))
