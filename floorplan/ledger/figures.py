"""Measure a real run: what autograd keeps (by hooks and by census), and the peaks of one step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.cost_models import memory
from floorplan.ledger.inputs import arguments
from floorplan.ledger.recorder import Saved
from floorplan.ledger.run import Run, Step, Watch, run
from floorplan.ledger.storage import bytes_of_tensors
from floorplan.torch_doors import tensors_in


@dataclass(frozen=True)
class Figures:
    """Bytes of one training step (design: `saved` is distinct storages, state and inputs apart)."""

    saved: int
    saved_refcount: int
    saved_census: int
    training_state_peak: int
    requested_peak: int
    total: int  # requested peak + model + optimizer state + the caller's batch
    trainable_parameters: int

    def as_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)


def _kept(saved: Sequence[Saved], owners: tuple[str, ...]) -> list[memory.SavedBytes]:
    return [memory.SavedBytes(s.storage, int(s.nbytes), int(s.tensor_bytes)) for s in saved if s.owner in owners]


def figures(model: nn.Module, hooked: Run, plain: Run, inputs: Sequence[Tensor]) -> Figures:
    """All figures from a hooked forward and a hook-free step of the same model."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    state = bytes_of_tensors([*model.parameters(), *model.buffers()])
    live = plain.timeline.peak(plain.saved_lives | plain.grad_lives)
    requested = plain.timeline.peak()
    return Figures(
        saved=memory.saved(_kept(hooked.saved, ("kept",))),
        saved_refcount=memory.saved_refcount(_kept(hooked.saved, ("kept", "input"))),
        saved_census=sum(int(plain.timeline.lives[i].nbytes) for i in plain.saved_lives),
        training_state_peak=memory.training_state_peak(state, bytes_of_tensors(trainable), live),
        requested_peak=requested,
        total=requested + state + memory.optimizer_state(bytes_of_tensors(trainable)) + bytes_of_tensors(inputs),
        trainable_parameters=sum(p.numel() for p in trainable),
    )


def measure(model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None) -> Figures:
    """Run `model` for real, twice: under hooks, and a whole step under the storage tracker.

    inputs: the forward's arguments, or its only one. The model's buffers, gradients and the random state are put back.
    """
    step = Step(model, arguments(inputs), autocast=autocast)
    hooked = run(step.forward, Watch(hooks=True, nodes=False), fake=False)
    plain = run(step, Watch(nodes=False), fake=False)
    return figures(model, hooked, plain, list(tensors_in(step.inputs)))
