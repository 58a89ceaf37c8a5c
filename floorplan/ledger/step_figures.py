"""The figures of one training step of a method, loss included: predicted on fake tensors, or measured.

Two conventions stand beside each other (docs/accounting.md): distinct storages, which is memory, and
every saved tensor once for each op that saved it, as the paper's Table 3 counts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.cost_models import memory
from floorplan.graph.untouched import undisturbed
from floorplan.layers.adapter import adapters
from floorplan.layers.fused import FusedConv
from floorplan.layers.lowrank import project
from floorplan.layers.paper import PaperSite
from floorplan.layers.replay import Replay, capturing
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.figures import figures
from floorplan.ledger.kernels import quiet_fakes
from floorplan.ledger.losses import Loss
from floorplan.ledger.marks import marked
from floorplan.ledger.run import Run, record, run_graph
from floorplan.ledger.storage import StorageTracker
from floorplan.trees import bytes_of_tensors, tensors_in


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


class Replaying:
    """The end of a MemFLoRA-SG step, for the ledger."""

    def kept(self, model: nn.Module) -> list[Tensor]:
        """dL/dq of every site."""
        return [m.gq for m in model.modules() if isinstance(m, FusedConv) and m.gq is not None]

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], tracker: StorageTracker) -> None:
        tracker.enter("", "replay")
        if isinstance(model, fx.GraphModule):
            model = marked(model, lambda node: tracker.enter(node, "replay"))
        Replay(model)(*inputs)


def predict_step(
    gm: fx.GraphModule, inputs: Sequence[Any], target: Tensor, loss: Loss, replays: bool = False
) -> StepFigures:
    """The figures from fake runs of these sizes; values are not read."""
    given, after = (*inputs, target), Replaying() if replays else None
    with capturing(gm, replays):
        counted = run_graph(concrete_fakes(gm, given), hooks=True, backward=True, loss=loss)
        fakes = concrete_fakes(gm, given)
        plain = run_graph(fakes, hooks=False, backward=True, loss=loss, after=after)
    return _figures(gm, counted, plain, given, replays)


def measure_step(
    gm: fx.GraphModule, inputs: Sequence[Any], target: Tensor, loss: Loss, replays: bool = False
) -> StepFigures:
    """The figures of two real steps, one under hooks; buffers, gradients and random state are put back."""
    given, after = (*inputs, target), Replaying() if replays else None
    options: dict[str, Any] = {"backward": True, "loss": loss, "by_node": False}
    with undisturbed(gm), capturing(gm, replays):
        counted = record(gm, given, hooks=True, **options)
        plain = record(gm, given, hooks=False, after=after, **options)
    return _figures(gm, counted, plain, given, replays)


def replay_sites(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[memory.ReplaySite]:
    """What each adapted MemFLoRA site of a replay holds, in the order of the forward."""
    fakes, found = concrete_fakes(gm, inputs), []

    def enter(m: nn.Module, args: tuple[Any, ...]) -> None:
        x, p = args[0], cast(Any, m).P
        kept = x.numel() // x.shape[1] * cast(Any, m).rank * x.element_size()
        if isinstance(m, FusedConv):
            kept *= m.geo.groups
            kept = kept // x[0, 0].numel() * project(x[:1], m.P, m.geo)[0, 0].numel()  # type: ignore[arg-type]
        found.append(memory.ReplaySite(kept, bytes_of_tensors([p]), x.numel() * x.element_size()))

    for _, m in adapters(fakes.gm):
        if isinstance(m, FusedConv | PaperSite):
            m.register_forward_pre_hook(enter)
    with quiet_fakes(), fakes.mode, torch.no_grad():
        fakes.gm(*fakes.inputs)
    return found


def _figures(gm: fx.GraphModule, counted: Run, plain: Run, given: Sequence[Any], replays: bool) -> StepFigures:
    found = figures(gm, counted, plain, list(tensors_in(tuple(given))))
    trained = bytes_of_tensors([p for p in gm.parameters() if p.requires_grad])
    state, moments = bytes_of_tensors([*gm.parameters(), *gm.buffers()]), memory.optimizer_state(trained)
    peak, of_projections = found.training_state_peak, 0
    refcount = memory.training_state_peak(state, trained, counted.refcount_peak)
    if replays:
        sites = replay_sites(gm, given[:-1])
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
        optimizer=moments + of_projections,
        trainable_parameters=found.trainable_parameters,
    )
