"""Losses by name, and the targets that fit them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.fakes import concrete_fakes
from floorplan.torch_doors import FakeTensor, tensors_in

Loss = Callable[[Any, Any], Tensor]  # (what the model returns, target) -> scalar


def cross_entropy(out: Any, target: Any) -> Tensor:
    """Cross entropy of the first output (B, K) with class numbers (B,)."""
    return F.cross_entropy(next(tensors_in(out)), target)


def counted(target: Tensor) -> float:
    """What a mean cross entropy divides by: targets of -100 count nowhere. A fake target counts in full."""
    if target.is_floating_point():
        return target.numel() / target.shape[1]
    valid = (target != -100).sum()
    return float(target.numel() if isinstance(valid, FakeTensor) else valid)


def total_cross_entropy(out: Any, target: Any) -> Tensor:
    """The sum over samples of `cross_entropy`."""
    return F.cross_entropy(next(tensors_in(out)), target, reduction="sum")


def mse(out: Any, target: Any) -> Tensor:
    """Mean squared error of the first output with a target of its shape."""
    return F.mse_loss(next(tensors_in(out)), target)


def total_of(out: Any, target: Any) -> Tensor:
    """The sum of all outputs; the target is not read."""
    return torch.stack([t.sum() for t in tensors_in(out)]).sum()


# Means that count their targets: what parts of a batch add up, and what the sum is divided by.
COUNTED: dict[Loss, tuple[Loss, Callable[[Any], float]]] = {cross_entropy: (total_cross_entropy, counted)}
LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse, "sum": total_of}


def loss_named(name: str) -> Loss:
    """The loss of that name; FloorplanError lists them all."""
    if name not in LOSSES:
        raise FloorplanError(f"--loss {name}: not known; use {', '.join(LOSSES)}")
    return LOSSES[name]


def target_for(gm: nn.Module, inputs: Sequence[Any], loss: str) -> Tensor:
    """A target that fits the model's first output; FloorplanError where the loss does not."""
    return target_like(concrete_fakes(gm, inputs).forward(), inputs, loss)


def target_like(returned: Any, inputs: Sequence[Any], loss: str) -> Tensor:
    """A target that fits what the model returns for these inputs, which may be fakes; FloorplanError likewise."""
    loss_named(loss)
    out = next(tensors_in(returned), None)
    if out is None:
        raise FloorplanError(f"--loss {loss}: the model returns no tensor; return one that the loss can take")
    device = next((t.device for t in tensors_in(tuple(inputs))), torch.device("cpu"))
    if loss != "cross_entropy":
        return torch.zeros(out.shape, dtype=out.dtype, device=device)
    if out.dim() < 2 or not out.is_floating_point():
        raise FloorplanError(f"--loss cross_entropy: the first output has shape {list(out.shape)}; use --loss sum")
    shape = (out.shape[0], *out.shape[2:])
    return torch.zeros(shape, dtype=torch.int64, device=device)
