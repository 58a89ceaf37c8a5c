"""The timeline of one step of a graph: predicted by a run on fake tensors, or measured by a real one.

    forward -> loss -> backward -> (replay)

The predicted run walks the graph node by node; the measured one runs its generated code on the tensors
themselves. Block by block they are the same: birth, death, bytes, node, direction, role.
"""

from bisect import bisect_left

import torch
from torch import fx, nn

from floorplan.cost_models import memory
from floorplan.layers.layer import model_state
from floorplan.layers.replay import Replay
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.pillars import pillar_of
from floorplan.ledger.recorder import Saved, ops_of
from floorplan.ledger.run import Run, Step, Watch, run
from floorplan.ledger.storage import bytes_of_tensors
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.torch_doors import tensors_in


def step_timeline(step: Step, *, fake: bool | Fakes = True, name: str = "") -> StepTimeline:
    """Every storage of a step of a graph: on fakes (`run`), or (fake=False) of a real one, all put back.

    The step ends with its gradients; Adam's moments are counted by formula.
    """
    seen = run(step, Watch(nodes=bool(fake), keepers=True), fake)
    replayed = Replay(step.model).projections() if step.replays else ()
    trained = [*(p for p in step.model.parameters() if p.requires_grad), *replayed]
    return timeline_of(seen, name, apart(step, memory.optimizer_state(bytes_of_tensors(trained))), step.model)


def apart(step: Step, moments: int) -> tuple[tuple[str, int], ...]:
    """Bytes of what stands apart from a step, by name."""
    state = bytes_of_tensors(model_state(step.model))
    return ("model", state), ("optimizer", moments), ("batch", bytes_of_tensors(list(tensors_in(step.given))))


def timeline_of(
    seen: Run, name: str, state: tuple[tuple[str, int], ...] = (), model: nn.Module | None = None
) -> StepTimeline:
    """What was seen of a step, as blocks, renumbered by births; the model's nodes tell why each is there."""
    lives, ops = seen.timeline.lives, ops_of(model) if isinstance(model, fx.GraphModule) else {}
    births, blocks = [life.born for life in lives], []
    for i, life in enumerate(lives):
        # Which of two storages is let go first between two births differs, and changes nothing.
        died = len(lives) if life.died is None else bisect_left(births, life.died)
        made, shape = (life.node, life.direction, life.op), tuple(map(int, life.shape))
        dtype, role = str(life.dtype).removeprefix("torch."), _role(i, seen, model, ops)
        blocks.append(Block(i, died, int(life.nbytes), *made, shape, dtype, role))
    return StepTimeline(name, tuple(blocks), len(blocks), state)


def _role(i: int, seen: Run, model: nn.Module | None, ops: dict[str, tuple[str, str]]) -> str:
    """Why a storage of a run is there."""
    if i in seen.saved_lives:
        life = seen.timeline.lives[i]
        node = seen.keepers.get(i, life.node)  # what is hidden from autograd, its maker keeps
        op, module = ops.get(node, (node, ""))
        packed = life.dtype == torch.uint8 and life.op.startswith("floorplan.")
        saved = Saved(node, op, module, life.shape, life.dtype, 0, "kept", life.op, life.nbytes, life.nbytes)
        return pillar_of(saved, model, packed)
    if i in seen.grad_lives:
        return "gradient"
    return "output" if i in seen.output_lives else "temporary"
