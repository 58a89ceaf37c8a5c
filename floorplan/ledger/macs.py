"""Multiply-adds of a method's step: by the paper's convention, and as the step really computes.

Layers are looked at in one fake forward; the step's own count is torch's flop counter over a fake step.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from floorplan.cost_models.paper_macs import Layer
from floorplan.layers.adapter import adapters
from floorplan.layers.branch import RankBranch
from floorplan.layers.factor import FactorConv
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import CONVS, TRANSPOSED
from floorplan.layers.lite import FrozenConv, LiteResidual
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv
from floorplan.layers.paper import PaperSite
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.run import Step, Watch, run
from floorplan.ledger.storage import StorageTracker
from floorplan.trees import tensors_in

MERGES = {LoraC: 3, LoraCOfficial: 3, FusedConv: 2}  # times a step: forward, input and weight grads


def layers_of(gm: nn.Module, inputs: Sequence[Any]) -> list[Layer]:
    """One Layer for every call of a layer that multiplies, a sample's worth each."""
    fakes, found = concrete_fakes(gm, inputs), []
    batch = next(t.shape[0] for t in tensors_in(tuple(inputs)))

    def look(m: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        layer = _layer(m, args[0].shape, next(tensors_in(out)).shape, batch)
        if layer is not None:
            found.append(layer)

    for m in fakes.gm.modules():
        m.register_forward_hook(look)
    fakes.forward()
    return found


def _layer(m: nn.Module, x: Sequence[int], y: Sequence[int], batch: int) -> Layer | None:
    """What one call of a layer multiplies, a sample; None for layers that do not."""
    points, inputs = math.prod(y[2:]), math.prod(x[2:])
    if isinstance(m, nn.Linear):
        n = m.weight.numel() * math.prod(y[:-1]) // batch
        return Layer(n, trained=n if m.weight.requires_grad else 0)
    if isinstance(m, CONVS + TRANSPOSED):
        n = m.weight.numel() * (inputs if isinstance(m, TRANSPOSED) else points)
        return Layer(n, trained=n if m.weight.requires_grad else 0)
    if isinstance(m, FrozenConv):
        return Layer(m.weight.numel() * points)
    if isinstance(m, LiteResidual):
        pooled = math.prod(-(-n // 2) for n in x[2:])
        beside = (m.wide.numel() + m.point.numel()) * pooled
        return Layer(0, beside, beside)
    if isinstance(m, PaperSite):
        return _paper(m, points, inputs)
    if isinstance(m, FusedConv):
        return _fused(m, points, inputs)
    if isinstance(m, FactorConv):
        up = m.U.numel() * points  # counted beside the conv, as published; the op itself merges
        return Layer(m.weight.numel() * points, m.D.numel() * points + up, up)
    if isinstance(m, LoraC | LoraCOfficial):
        n = m.weight.numel() * points
        return Layer(n, 0, n, m.rank * m.weight.numel())
    if isinstance(m, SideConv):
        beside = (m.A.numel() + m.B.numel()) * points
        return Layer(m.weight.numel() * points, beside, beside)
    if isinstance(m, RankBranch):
        down = points if m.kernel == "down" else inputs
        return Layer(0, m.P.numel() * down + m.U.numel() * points, m.U.numel() * points)
    return None


def _paper(m: PaperSite, points: int, inputs: int) -> Layer | None:
    if m.weight is None:
        return None
    base = m.weight.numel() * points
    if not m.rank:
        return Layer(base)
    up = m.U.numel() * points
    return Layer(base, m.P.numel() * inputs + up, up)


def _fused(m: FusedConv, points: int, inputs: int) -> Layer:
    base = m.weight.numel() * (inputs if m.geo.transposed else points)
    if m.U is None or m.P is None:
        return Layer(base)
    kept = points if m.geo.sampled else inputs
    up = m.U.numel() * (inputs if m.geo.transposed else points)
    # Only the projection runs beside the conv; its adjoint is part of the merged weight's.
    return Layer(base, m.P.numel() * kept, up - m.P.numel() * kept, m.rank * m.weight.numel())


def merges_of(gm: nn.Module) -> int:
    """How often a step multiplies out each adapter, by the paper's convention."""
    return max((MERGES.get(type(m), 0) for _, m in adapters(gm)), default=0)


def _conv_backward(g: Sequence[int], x: Sequence[int], w: Sequence[int], *rest: Any, out_shape: Any = None) -> int:
    """Two flops a multiply-add; torch's own formula counts a grouped weight gradient as if dense."""
    transposed, mask = rest[4], rest[7]
    taken = 2 * sum(bool(m) for m in mask[:2])
    return taken * math.prod(x if transposed else g) * math.prod(w[1:])


BACKWARD = {torch.ops.aten.convolution_backward: _conv_backward}


class _Multiplied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Flops of a step by direction, as torch counts its ops."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        direction = self.tracker.direction
        own = BACKWARD.get(func.overloadpacket) if direction == "backward" else None
        if own is not None:
            self.flops[direction] += own(*(a.shape if isinstance(a, Tensor) else a for a in args))
        elif (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops[direction] += count(*args, **(kwargs or {}), out_val=out)
        return out


def own_macs(step: Step) -> dict[str, int]:
    """Multiply-adds of one fake step, as torch counts its ops: forward, backward and replay."""
    seen: list[_Multiplied] = []

    def within(tracker: StorageTracker) -> _Multiplied:
        seen.append(_Multiplied(tracker))
        return seen[0]

    run(step, Watch(nodes=False, within=within))
    flops = seen[0].flops
    found = {"forward": flops["forward"] + flops["loss"], "backward": flops["backward"]}
    found |= {"replay": flops["replay"]} if step.replays else {}
    return {k: n // 2 for k, n in found.items()}
