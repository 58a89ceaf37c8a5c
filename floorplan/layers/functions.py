"""How a layer calls an autograd function of ours: under autograd alone, and under the transforms of torch.func.

autograd alone                         the function as it stands; a second derivative is refused by name
vmap, and one of grad, vjp and jacrev  the same forward and backward: what is kept is a further result
nested gradients, forward mode         `formula`, the same values in torch's own ops, which keeps more
"""

from collections.abc import Callable
from copy import copy
from functools import partial, wraps
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from floorplan.errors import FloorplanError
from floorplan.torch_doors import forward_mode, gradient_levels, transformed


class CompactFunction(torch.autograd.Function):
    """An autograd function that keeps less than torch's own ops would: forward(ctx, *args) and backward(ctx, g).

    `layer` is who calls it, for errors.
    """

    layer: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.backward = staticmethod(_once(cls.backward, cls.layer))  # type: ignore[method-assign]

    @staticmethod
    def formula(*args: Any) -> Tensor:
        """The result by torch's own ops, which can be differentiated any number of times and in forward mode."""
        raise NotImplementedError


def call(function: type[CompactFunction], *args: Any) -> Tensor:
    """The function's result, under whatever transforms it is called."""
    if not transformed():
        return cast(Tensor, applied(function, *args))
    needs = tuple(gradient_levels(a) if isinstance(a, Tensor) else () for a in args)
    if len({level for levels in needs for level in levels}) != 1 or forward_mode():
        return function.formula(*args)
    notes = _Notes(tuple(map(bool, needs)))
    return cast(Tensor, applied(_Transformed, function, notes, *args)[0])


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked of one of these, by autograd or by a transform of torch.func."""
    given = [t for t in tensors if t is not None] if torch.is_grad_enabled() else []
    if not transformed():
        return any(t.requires_grad for t in given)
    return bool(given) and (forward_mode() or any(map(gradient_levels, given)))


def add_(z: Tensor, t: Tensor) -> Tensor:
    """z + t in z's memory; in new memory under transforms, where t may be a batch of which z is one."""
    return z + t if transformed() else z.add_(t)


def mul_(z: Tensor, t: Tensor) -> Tensor:
    """z * t likewise."""
    return z * t if transformed() else z.mul_(t)


class _Notes:
    """What a forward notes for its backward, in place of autograd's own context."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _Transformed(torch.autograd.Function):
    """A CompactFunction, (function, notes, *args), whose results are its own and all new tensors that it saves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: type[CompactFunction], notes: Any, *args: Any) -> tuple[Tensor, ...]:
        y: Tensor = cast(Any, function).forward(notes, *args)
        at = {id(a): i for i, a in enumerate(args) if isinstance(a, Tensor)}
        new = [t for t in notes.saved_tensors if t is not None and id(t) not in at]
        at |= {id(t): len(args) + i for i, t in enumerate(new)}
        notes.places = [None if t is None else at[id(t)] for t in notes.saved_tensors]
        notes.saved_tensors = ()
        return y, *new

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, ctx.notes, *args = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        every = (*args, *output[1:])
        ctx.save_for_backward(*(None if i is None else every[i] for i in ctx.notes.places))

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        notes = copy(ctx.notes)
        notes.needs_input_grad, notes.saved_tensors = ctx.needs_input_grad[2:], ctx.saved_tensors
        return None, None, *ctx.function.backward(notes, g)


def _once(backward: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """A backward whose gradients, if they are differentiated in turn, are refused by one line."""

    @wraps(backward)
    def run(ctx: Any, *gs: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gs)
        if not torch.is_grad_enabled():
            return found
        # Not gs alone: the result depends on the inputs too. Transforms of these come by the formula.
        roots = gs[:1] if transformed() else _leaves(ctx)
        return tuple(t if t is None else applied(_Refused, layer, t, *roots) for t in found)

    return run


def _leaves(node: Any) -> list[Tensor]:
    """What a node of autograd was computed from."""
    found, todo, seen = [], [node], {node}
    while todo:
        node = todo.pop()
        found += [node.variable] if hasattr(node, "variable") else []
        more = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= more
        todo += more
    return found


class _Refused(torch.autograd.Function):
    """A gradient t that cannot be differentiated by what it came from, (layer, t, *roots)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(layer: str, t: Tensor, *roots: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layer = inputs[0]

    @staticmethod
    def jvp(ctx: Any, *ts: Any) -> Any:
        return _Refused.backward(ctx)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        why = f"{ctx.layer}: its gradient cannot be differentiated again, what that takes is not kept"
        raise FloorplanError(f"{why}; nest torch.func.grad, or use the model from before the rewrite")


def by_sample(*ops: Any) -> None:
    """Let vmap call custom ops for one sample after the other, each contiguous: a batched forward asks no layout."""
    for op in ops:
        op.register_vmap(partial(_each, op))


def _each(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    given = [(a, d if isinstance(a, Tensor) else None) for a, d in zip(args, in_dims, strict=True)]
    each = [op(*(a if d is None else a.select(d, i).contiguous() for a, d in given)) for i in range(info.batch_size)]
    if isinstance(each[0], Tensor):
        return torch.stack(each), 0
    return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * len(each[0])


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """What an autograd function makes; not all versions have a type for its apply."""
    return cast(Any, function).apply(*args)
