"""The figures of one training step of a method, loss included: predicted on fake tensors, or measured.

Two conventions stand beside each other (docs/accounting.md): distinct storages, which is memory, and
every saved tensor once for each op that saved it, as the paper's Table 3 counts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from floorplan.cost_models import memory
from floorplan.layers.adapter import adapters
from floorplan.layers.layer import Adapter
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.figures import figures
from floorplan.ledger.run import Step, Watch, run
from floorplan.ledger.storage import bytes_of_tensors
from floorplan.torch_doors import tensors_in


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


def step_figures(step: Step, fake: bool = True) -> StepFigures:
    """The figures from two runs, one under hooks: on fakes of these sizes, or for real, all put back."""
    gm = step.model
    counted, plain = (run(step, Watch(hooks=hooks, nodes=fake), fake) for hooks in (True, False))
    found = figures(gm, counted, plain, list(tensors_in(step.given)))
    trained = bytes_of_tensors([p for p in gm.parameters() if p.requires_grad])
    state = bytes_of_tensors([*gm.parameters(), *gm.buffers()])
    peak, of_projections = found.training_state_peak, 0
    refcount = memory.training_state_peak(state, trained, counted.refcount_peak)
    if step.replays:
        sites = replay_sites(gm, step.inputs)
        held = memory.training_state_peak(state, trained, trained + memory.replay_peak(sites))
        of_projections = memory.optimizer_state(sum(s.projection for s in sites))
        peak, refcount = max(peak, held) + of_projections, max(refcount, held) + of_projections
    return StepFigures(
        saved=found.saved,
        saved_refcount=found.saved_refcount,
        training_state_peak=peak,
        training_state_peak_refcount=refcount,
        requested_peak=found.requested_peak,
        total=found.total + of_projections,
        optimizer=memory.optimizer_state(trained) + of_projections,
        trainable_parameters=found.trainable_parameters,
    )


def replay_sites(gm: nn.Module, inputs: Sequence[Any]) -> list[memory.ReplaySite]:
    """What each adapted MemFLoRA site of a replay holds, in the order of the forward."""
    fakes, found = concrete_fakes(gm, inputs), []

    def enter(m: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(m, Adapter) and (q := m.bottleneck(args[0])) is not None:
            found.append(memory.ReplaySite(*(bytes_of_tensors([t]) for t in (q, m.get_buffer("P"), args[0]))))

    for _, m in adapters(fakes.gm):
        m.register_forward_pre_hook(enter)
    fakes.forward()
    return found
