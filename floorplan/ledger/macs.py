"""Multiply-adds of a method's step: by the paper's convention, and as the step really computes.

Layers are looked at in one fake forward; the step's own count is torch's flop counter over a fake step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from floorplan.cost_models.paper_macs import Layer
from floorplan.layers.adapter import adapters
from floorplan.layers.branch import RankBranch
from floorplan.layers.factor import FactorConv
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import CONVS, TRANSPOSED
from floorplan.layers.lite import FrozenConv, LiteResidual
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv
from floorplan.layers.paper import PaperSite
from floorplan.layers.replay import Replay, capturing
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.kernels import quiet_fakes
from floorplan.ledger.losses import Loss
from floorplan.trees import tensors_in

MERGES = {LoraC: 3, LoraCOfficial: 3, FusedConv: 2}  # times a step: forward, input and weight grads


def layers_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Layer]:
    """One Layer for every call of a layer that multiplies, a sample's worth each."""
    fakes, found = concrete_fakes(gm, inputs), []
    batch = next(t.shape[0] for t in tensors_in(tuple(inputs)))

    def look(m: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        layer = _layer(m, args[0].shape, next(tensors_in(out)).shape, batch)
        if layer is not None:
            found.append(layer)

    for m in fakes.gm.modules():
        m.register_forward_hook(look)
    with quiet_fakes(), fakes.mode, torch.no_grad():
        fakes.gm(*fakes.inputs)
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


def own_macs(
    gm: fx.GraphModule, inputs: Sequence[Any], target: Tensor, loss: Loss, replays: bool = False
) -> dict[str, int]:
    """Multiply-adds of one fake step, as torch counts its ops: forward, backward and replay."""
    fakes = concrete_fakes(gm, (*inputs, target))
    found = {}
    with quiet_fakes(), fakes.mode:
        with FlopCounterMode(display=False) as counter:
            value = loss(fakes.gm(*fakes.inputs[:-1]), fakes.inputs[-1])
        found["forward"] = counter.get_total_flops() // 2
        with FlopCounterMode(display=False, custom_mapping=BACKWARD) as counter:
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
        found["backward"] = counter.get_total_flops() // 2
    if replays:
        with capturing(gm, True):
            fakes = concrete_fakes(gm, (*inputs, target))
        with quiet_fakes(), fakes.mode:
            loss(fakes.gm(*fakes.inputs[:-1]), fakes.inputs[-1]).backward()  # type: ignore[no-untyped-call]
            with FlopCounterMode(display=False) as counter:
                Replay(fakes.gm)(*fakes.inputs[:-1])
        found["replay"] = counter.get_total_flops() // 2
    return found
