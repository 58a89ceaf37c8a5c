"""What a rematerialised graph runs: values that are promised in the forward and computed in the backward.

    k = Keep(x)                      x is kept
    p = Promise(conv, k)             z = conv(x), if anyone asks: holds k, not z
    a = Forgetful(silu, z; p)        silu keeps p where it would have kept z

The first to ask for a promise computes it, from values kept and other promises. It then lets these go and
is held itself only by those who have still to read it, so the usual rules of memory free everything at its
last use. Results are those of the same calls on the same tensors: the same bits.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from floorplan.errors import FloorplanError
from floorplan.layers.layer import Layer
from floorplan.layers.targets import ATTRIBUTES, function_named, methods
from floorplan.torch_doors import saved_hooks, storage_key, tensors_in, tree_iter, tree_map, version_of


class Kept:
    """One tensor kept for the backward, as autograd would keep it: outer hooks see it come and go."""

    def __init__(self, t: Tensor) -> None:
        self.device = t.device.type
        hooks = saved_hooks()  # inner ones replace them, so ours hand on what they let pass
        self._unpack = hooks[1] if hooks else None
        self._packed: Any = hooks[0](t.detach()) if hooks else t.detach()
        self._written = version_of(t)

    def value(self) -> Tensor:
        """The tensor; RuntimeError, as autograd's own, if it has been written to."""
        if self._unpack is not None:
            self._packed, self._unpack = self._unpack(self._packed), None
        elif version_of(self._packed) != self._written:
            why = "has been modified by an inplace operation; write it out of place"
            raise RuntimeError(f"a tensor {list(self._packed.shape)} needed for gradient computation {why}")
        return self._packed  # type: ignore[no-any-return]


class Promised:
    """The result of a call that is not kept; computed when first asked for."""

    device: str

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call: tuple[Any, ...] | None = (call, args, kwargs)
        ours = (v.device for v in tree_iter((args, kwargs)) if isinstance(v, Promised | Kept))
        device = next((t.device.type for t in tensors_in((args, kwargs))), None) or next(ours, "cpu")
        casts = device != "meta" and torch.is_autocast_enabled(device)
        self.device, self._cast = device, torch.get_autocast_dtype(device) if casts else None
        self._result: Any = None

    def value(self) -> Any:
        """What the call returns, without a gradient history; computed once."""
        if self._call is not None:
            call, args, kwargs = self._call
            autocast: Any = nullcontext()
            if self.device != "meta":
                autocast = torch.autocast(self.device, self._cast, enabled=self._cast is not None)
            with torch.no_grad(), autocast:
                self._result = call(*tree_map(_value, args), **tree_map(_value, kwargs))
            self._call = None  # lets go of what it was computed from
        return self._result


def _value(v: Any) -> Any:
    return v.value() if isinstance(v, Promised | Kept) else v


class _Slot:
    """One tensor that a node saves: itself, or a promise and where the tensor lies in it."""

    def __init__(self, t: Tensor) -> None:
        self.key, self.layout = storage_key(t), _layout(t)
        self.source: Tensor | Kept | Promised = t

    def settle(self, promises: dict[int, Promised]) -> None:
        """Decide, once the node has run and its result is known."""
        assert isinstance(self.source, Tensor)
        self.source = promises[self.key] if self.key in promises else Kept(self.source)

    def get(self) -> Tensor:
        """The tensor, or one of the same bits in the same layout."""
        t: Tensor = _value(self.source)
        return t.as_strided(*self.layout) if isinstance(self.source, Promised) and _layout(t) != self.layout else t


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset()


_UNMERGEABLE = "belongs to a rematerialised graph; merge before `remat`"


class Keep(Layer):
    """Keep a tensor for the promises that need it; None where nothing is differentiated."""

    stored = "floorplan.remat_region.Keep"
    unmergeable = _UNMERGEABLE

    def forward(self, t: Tensor) -> Kept | None:
        """t: any tensor."""
        return Kept(t) if torch.is_grad_enabled() else None


class _Calling(Layer):
    """Calls a function, a tensor's method, or a module that it is given as the first argument."""

    unmergeable = _UNMERGEABLE

    def __init__(self, kind: str, target: str) -> None:
        super().__init__()
        if kind not in ("function", "method", "module"):
            raise ValueError(f"{type(self).__name__}: kind {kind} is none of function, method, module")
        if kind == "method" and target not in methods():
            raise ValueError(f"{type(self).__name__}: {target} is no tensor method that a file may name")
        self.kind, self.target = kind, target
        self._called = function_named(target, type(self).__name__) if kind == "function" else None

    def extra_repr(self) -> str:
        return f"{self.kind} {self.target}".strip()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The original call."""
        if self._called is getattr and args[1] not in ATTRIBUTES:  # a file may ask for anything
            raise FloorplanError(f"promise of {args[1]}: no attribute that a graph may read; refused")
        if self._called is not None:
            return self._called(*args, **kwargs)
        if self.kind == "method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return args[0](*args[1:], **kwargs)


class Promise(_Calling):
    """Make the promise of a call's result."""

    stored = "floorplan.remat_region.Promise"

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Promised | None:
        """args, kwargs: of the call, with kept values and promises in the place of tensors."""
        return Promised(self.call, tuple(args), dict(kwargs)) if torch.is_grad_enabled() else None


class Forgetful(_Calling):
    """Run a call whose backward reads promises in the place of tensors that are not kept."""

    stored = "floorplan.remat_region.Forgetful"

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: tuple[Tensor, ...],
        promises: tuple[Promised | None, ...],
        own: Promised | None = None,
    ) -> Any:
        """promises[i] stands for all that is saved of the memory of tensors[i], `own` of the result's."""
        if not torch.is_grad_enabled():
            return self.call(*args, **kwargs)
        slots: list[_Slot] = []

        def pack(t: Tensor) -> _Slot:
            slots.append(_Slot(t))
            return slots[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, _Slot.get):
            out = self.call(*args, **kwargs)
        known = {storage_key(t): p for t, p in zip(tensors, promises, strict=True) if p is not None}
        if own is not None:
            known[storage_key(out)] = own
        for s in slots:
            s.settle(known)
        return out
