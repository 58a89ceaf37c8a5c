"""The figures of one training step of a method, loss included: predicted on fake tensors, or measured.

Two conventions stand beside each other (docs/accounting.md): distinct storages, which is memory, and
every saved tensor once for each op that saved it, as the paper's Table 3 counts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from floorplan.cost_models import memory
from floorplan.errors import FloorplanError
from floorplan.ledger import Loss, Run, record, run_graph
from floorplan.measure import _bytes, _kept, _undisturbed
from floorplan.storage import tensors_in
from floorplan.symbols import concrete_fakes


@dataclass(frozen=True)
class StepFigures:
    """Bytes of one step, and what trains; the model's outputs go through a loss."""

    saved: int
    saved_refcount: int
    training_state_peak: int
    training_state_peak_refcount: int
    requested_peak: int
    total: int
    optimizer: int
    trainable_parameters: int

    def as_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)


def cross_entropy(out: Any, target: Any) -> Tensor:
    """Cross entropy of the first output (B, K) with class numbers (B,)."""
    return F.cross_entropy(next(tensors_in(out)), target)


def mse(out: Any, target: Any) -> Tensor:
    """Mean squared error of the first output with a target of its shape."""
    return F.mse_loss(next(tensors_in(out)), target)


def total_of(out: Any, target: Any) -> Tensor:
    """The sum of all outputs; the target is not read."""
    return torch.stack([t.sum() for t in tensors_in(out)]).sum()


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse, "sum": total_of}


def target_for(gm: nn.Module, inputs: Sequence[Any], loss: str) -> Tensor:
    """A target that fits the model's first output; FloorplanError where the loss does not."""
    fakes = concrete_fakes(gm, inputs)  # type: ignore[arg-type]
    with fakes.mode, torch.no_grad():
        out = next(tensors_in(fakes.gm(*fakes.inputs)), None)
    if loss not in LOSSES or out is None:
        raise FloorplanError(f"--loss {loss}: not known; use {', '.join(LOSSES)}")
    device = next((t.device for t in tensors_in(tuple(inputs))), torch.device("cpu"))
    if loss != "cross_entropy":
        return torch.zeros(out.shape, dtype=out.dtype, device=device)
    if out.dim() < 2 or not out.is_floating_point():
        raise FloorplanError(f"--loss cross_entropy: the first output has shape {list(out.shape)}; use --loss sum")
    shape = (out.shape[0], *out.shape[2:])
    return torch.zeros(shape, dtype=torch.int64, device=device)


def predict_step(gm: fx.GraphModule, inputs: Sequence[Any], target: Tensor, loss: Loss) -> StepFigures:
    """The figures from fake runs of these sizes; values are not read."""
    given = (*inputs, target)
    counted = run_graph(concrete_fakes(gm, given), hooks=True, backward=True, loss=loss)
    plain = run_graph(concrete_fakes(gm, given), hooks=False, backward=True, loss=loss)
    return _figures(gm, counted, plain, given)


def measure_step(gm: nn.Module, inputs: Sequence[Any], target: Tensor, loss: Loss) -> StepFigures:
    """The figures of two real steps, one under hooks; buffers, gradients and random state are put back."""
    given = (*inputs, target)
    with _undisturbed(gm):
        counted = record(gm, given, hooks=True, backward=True, loss=loss, by_node=False)
        plain = record(gm, given, hooks=False, backward=True, loss=loss, by_node=False)
    return _figures(gm, counted, plain, given)


def _figures(gm: nn.Module, counted: Run, plain: Run, given: Sequence[Any]) -> StepFigures:
    trained = [p for p in gm.parameters() if p.requires_grad]
    state = _bytes([*gm.parameters(), *gm.buffers()])
    moments = memory.optimizer_state(_bytes(trained))
    live = plain.timeline.peak(plain.saved_lives | plain.grad_lives)
    requested = plain.timeline.peak()
    return StepFigures(
        saved=memory.saved(_kept(counted.saved, ("kept",))),
        saved_refcount=memory.saved_refcount(_kept(counted.saved, ("kept", "input"))),
        training_state_peak=state + moments + live,
        training_state_peak_refcount=state + moments + counted.refcount_peak,
        requested_peak=requested,
        total=requested + state + moments + _bytes(list(tensors_in(tuple(given)))),
        optimizer=moments,
        trainable_parameters=sum(p.numel() for p in trained),
    )
