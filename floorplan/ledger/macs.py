"""Multiply-adds of a method's step: by the paper's convention, and as the step really computes.

Layers are looked at in one fake forward; the step's own count is torch's flop counter over a fake step.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from floorplan.layers.adapter import adapters
from floorplan.layers.geometry import CONVS, TRANSPOSED
from floorplan.layers.layer import Layer
from floorplan.layers.macs import Macs
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.run import Step, Watch, run
from floorplan.ledger.storage import StorageTracker
from floorplan.torch_doors import TorchDispatchMode, tensors_in


def layers_of(gm: nn.Module, inputs: Sequence[Any]) -> list[Macs]:
    """One Macs for every call of a layer that multiplies, a sample's worth each."""
    fakes, found = concrete_fakes(gm, inputs), []
    batch = next(t.shape[0] for t in tensors_in(tuple(inputs)))

    def look(m: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        x, y = next(tensors_in(args), None), next(tensors_in(out), None)
        if x is not None and y is not None and (macs := _macs(m, x.shape, y.shape, batch)) is not None:
            found.append(macs)

    inside = {c for m in fakes.gm.modules() if isinstance(m, Layer) for c in m.modules() if c is not m}
    for m in {*fakes.gm.modules()} - inside:
        m.register_forward_hook(look)
    fakes.forward()
    return found


def _macs(m: nn.Module, x: Sequence[int], y: Sequence[int], batch: int) -> Macs | None:
    """What one call of a layer multiplies, a sample; None for layers that do not."""
    if isinstance(m, Layer):
        return m.macs(x, y)
    if isinstance(m, nn.Linear):
        n = m.weight.numel() * math.prod(y[:-1]) // batch
    elif isinstance(m, CONVS + TRANSPOSED):
        n = m.weight.numel() * math.prod((x if isinstance(m, TRANSPOSED) else y)[2:])
    else:
        return None
    return Macs(n, trained=n if m.weight.requires_grad else 0)


def merges_of(gm: nn.Module) -> int:
    """How often a step multiplies out each adapter, by the paper's convention."""
    return max((m.merges_a_step for _, m in adapters(gm)), default=0)


def _conv_backward(g: Sequence[int], x: Sequence[int], w: Sequence[int], *rest: Any, out_shape: Any = None) -> int:
    """Two flops a multiply-add; torch's own formula counts a grouped weight gradient as if dense."""
    transposed, mask = rest[4], rest[7]
    taken = 2 * sum(bool(m) for m in mask[:2])
    return taken * math.prod(x if transposed else g) * math.prod(w[1:])


BACKWARD = {torch.ops.aten.convolution_backward: _conv_backward}


class _Multiplied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Flops of a step by direction, as torch counts its ops."""

    def __init__(self, tracker: StorageTracker, flops: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker, self.flops = tracker, flops

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
    flops: Counter[str] = Counter()
    run(step, Watch(nodes=False, within=lambda tracker: _Multiplied(tracker, flops)))
    found = {"forward": flops["forward"] + flops["loss"], "backward": flops["backward"]}
    found |= {"replay": flops["replay"]} if step.replays else {}
    return {k: n // 2 for k, n in found.items()}
