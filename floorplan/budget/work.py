"""What a run computes and moves, by kind of operation, as ops pass the dispatcher: for a roofline."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from floorplan.layers.activations import ACTIVATIONS
from floorplan.layers.bits import layout_of
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.macs import BACKWARD
from floorplan.ledger.run import Step, Watch, run
from floorplan.torch_doors import TorchDispatchMode, schema_of, tree_iter

CONVS = ("pointwise", "dense", "depthwise")  # each in both layouts; else clamp, pack, apply, all
Amount = tuple[float, float, float]  # flops, bytes moved, calls


@dataclass(frozen=True)
class Worked:
    """kind -> (flops, bytes read and written, calls)."""

    by_kind: dict[str, Amount] = field(default_factory=dict)

    def plus(self, other: "Worked", times: float = 1) -> "Worked":
        """This and `times` the other."""
        kinds = dict.fromkeys((*self.by_kind, *other.by_kind))
        zero = (0.0, 0.0, 0.0)
        pairs = {k: zip(self.by_kind.get(k, zero), other.by_kind.get(k, zero), strict=True) for k in kinds}
        return Worked({k: tuple(a + times * b for a, b in v) for k, v in pairs.items()})  # type: ignore[misc]

    def slope(self, other: "Worked", apart: int) -> "Worked":
        """What a sample adds, by the work of `apart` samples more."""
        return Worked().plus(other.plus(self, -1), 1 / apart)

    @property
    def macs(self) -> float:
        """Multiply-adds of matrix products and convolutions."""
        return sum(v[0] for k, v in self.by_kind.items() if k.startswith(CONVS)) / 2

    def seconds(self, time_of: Callable[[str, Amount], float]) -> float:
        """Seconds by a machine's rates."""
        return sum(time_of(k, v) for k, v in self.by_kind.items())


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operations until `take`; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[float]] = {}

    def take(self) -> Worked:
        """What was done since the last call."""
        found, self.found = self.found, {}
        return Worked({k: (v[0], v[1], v[2]) for k, v in found.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False) and schema_of(func).name not in _FREE:
            kind, flops = _kind(func, args, kwargs or {}, out)
            moved = sum(t.numel() * t.element_size() for t in tree_iter((args, kwargs, out)) if isinstance(t, Tensor))
            total = self.found.setdefault(kind, [0.0, 0.0, 0.0])
            for i, v in enumerate((flops, moved, 1)):
                total[i] += v
        return out


_UNMOVED = "empty empty_strided empty_like empty_permuted new_empty new_empty_strided detach"
_FREE = {f"aten::{n}" for n in _UNMOVED.split()}
_OTHER = {f"aten::{name}": a.rate for a in ACTIVATIONS.values() for name in a.kernels.split()}
_OTHER |= {"floorplan::pack_gate": "pack", "floorplan::apply_gate": "apply"}
_CONV = ("aten::convolution", "aten::convolution_backward")


def step_work(step: Step, fake: bool | Fakes = True) -> Worked:
    """What one step under autograd computes; `fake` as `run` takes it."""
    work = Work()
    run(step, Watch(within=lambda _: work), fake)
    return work.take()


def _kind(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, float]:
    name = schema_of(func).name
    own, count = BACKWARD.get(func.overloadpacket), flop_registry.get(func.overloadpacket)
    if count is None:
        n = max((t.numel() for t in tree_iter((args, out)) if isinstance(t, Tensor)), default=0)
        return _OTHER.get(name.rstrip("_"), "all"), float(n)
    shapes = [a.shape if isinstance(a, Tensor) else a for a in args]
    flops = float(own(*shapes) if own is not None else count(*args, **kwargs, out_val=out))
    if name not in _CONV:
        return "pointwise, channels_last", flops  # a product of rows is one
    x, w, *_, groups = args[1:10] if name == _CONV[1] else args[:9]  # the backward has the output's gradient in front
    kind = "depthwise" if groups > 1 else "pointwise" if prod(w.shape[2:]) == 1 else "dense"
    return f"{kind}, {'channels_last' if layout_of(x) else 'contiguous'}", flops


__all__ = ["CONVS", "Work", "Worked", "step_work"]
