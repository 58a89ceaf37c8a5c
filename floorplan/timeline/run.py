"""The timeline of one step of a graph: predicted by a run on fake tensors, or measured by a real one.

    forward -> loss -> backward -> (replay) -> (optimizer step)

The predicted run walks the graph node by node; the measured one runs its generated code on the tensors
themselves. Block by block they are the same: birth, death, bytes, node, direction, role.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from floorplan.cost_models import memory
from floorplan.errors import FloorplanError
from floorplan.layers.replay import Replay
from floorplan.ledger.criterion import Proof
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.pillars import pillar_of
from floorplan.ledger.recorder import Saved, ops_of
from floorplan.ledger.run import Run, Step, Watch, run
from floorplan.ledger.storage import Life, StorageTracker
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.torch_doors import by_foreach
from floorplan.trees import bytes_of_tensors, model_state, tensors_in

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params, foreach: torch.optim.Adam(params, lr=1e-3, foreach=foreach),
    "sgd": lambda params, foreach: torch.optim.SGD(params, lr=1e-2, foreach=foreach),
}


def step_timeline(
    step: Step, *, fake: bool | Fakes = True, optimizer: str | None = None, name: str = "", proof: Proof | None = None
) -> StepTimeline:
    """Every storage of a step of a graph: on fakes (`run`), or (fake=False) of a real one, all put back.

    optimizer: "adam", "sgd", or None for a step that ends with its gradients (Adam's moments are then
    counted by formula). proof: gives the kept storages their formulas.
    """
    with _same_parameters(step.model, None if fake else optimizer):
        seen = run(_ended(step, optimizer), Watch(nodes=bool(fake), keepers=True), fake)
    moments = sum(int(seen.timeline.lives[i].nbytes) for i in seen.apart)
    if optimizer is None:
        moments = memory.optimizer_state(bytes_of_tensors(_trained(step.model, step.replays)))
    return timeline_of(seen, name, apart(step, moments), _Roles(step.model, seen, proof))


def _ended(step: Step, optimizer: str | None) -> Step:
    """The step with an optimizer's at its end."""
    if optimizer is None:
        return step
    if optimizer not in _OPTIMIZERS:
        raise FloorplanError(f"optimizer {optimizer}: not known; use {', '.join(_OPTIMIZERS)}")
    # Which kernels an optimizer takes depends on the real tensors.
    foreach = by_foreach(_trained(step.model, step.replays))

    def end(model: nn.Module, tracker: StorageTracker) -> list[Tensor]:
        tracker.enter("optimizer", "optimizer")
        trained = _trained(model, step.replays)
        made = _OPTIMIZERS[optimizer](trained, foreach) if trained else None
        if made is None:
            return []
        made.step()
        return [t for s in made.state.values() for t in s.values() if isinstance(t, Tensor)]

    return replace(step, after=end)


def timeline_of(
    seen: Run, name: str, state: tuple[tuple[str, int], ...] = (), roles: "_Roles | None" = None
) -> StepTimeline:
    """What was seen of a step, as blocks; `roles` tells why each is there."""
    roles = roles or _Roles(None, seen)
    blocks = _blocks(seen.timeline.lives, [i for i in range(len(seen.timeline.lives)) if i not in seen.apart], roles.of)
    return StepTimeline(name, blocks, len(blocks), state)


def _trained(model: nn.Module, replays: bool) -> list[Tensor]:
    """What the optimizers step: trainable parameters, and projections whose gradient is replayed."""
    return [*(p for p in model.parameters() if p.requires_grad), *(Replay(model).projections() if replays else ())]


@contextmanager
def _same_parameters(gm: nn.Module, optimizer: str | None) -> Iterator[None]:
    """Parameters as they were, after a step that changed them."""
    before = [(p, p.detach().clone()) for p in gm.parameters()] if optimizer else []
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old in before:
                p.copy_(old)


def apart(step: Step, moments: int) -> tuple[tuple[str, int], ...]:
    """Bytes of what stands apart from a step, by name."""
    state = bytes_of_tensors(model_state(step.model))
    return ("model", state), ("optimizer", moments), ("batch", bytes_of_tensors(list(tensors_in(step.given))))


def _blocks(lives: Sequence[Life], chosen: Sequence[int], of: Callable[[int], tuple[str, str]]) -> tuple[Block, ...]:
    """The chosen storages, renumbered by births; `of` gives role and formula."""
    births, blocks = [lives[i].born for i in chosen], []
    for born, i in enumerate(chosen):
        life = lives[i]
        # Which of two storages is let go first between two births differs, and changes nothing.
        died = len(chosen) if life.died is None else bisect_left(births, life.died)
        role, formula = of(i)
        made, shape = (life.node, life.direction, life.op), tuple(map(int, life.shape))
        blocks.append(Block(born, died, int(life.nbytes), *made, shape, _dtype(life), role, formula))
    return tuple(blocks)


def _dtype(life: Life) -> str:
    return str(life.dtype).removeprefix("torch.")


class _Roles:
    """Why each storage of a run is there."""

    def __init__(self, model: nn.Module | None, seen: Run, proof: Proof | None = None) -> None:
        self.model, self.run, self.lives = model, seen, seen.timeline.lives
        self.ops = ops_of(model) if isinstance(model, fx.GraphModule) else {}
        # Formulas of the proof by the node that keeps, dtype and bytes; each is given out once.
        self.formulas: dict[tuple[str, str, int], list[str]] = {}
        once = {e.storage: e for e in reversed(proof.kept)} if proof else {}
        for e in sorted(once.values(), key=lambda e: e.storage):
            self.formulas.setdefault((e.node, e.dtype, e.nbytes), []).append(e.expr)

    def of(self, i: int) -> tuple[str, str]:
        """(role, formula or "")."""
        if i in self.run.saved_lives:
            saver = self.run.keepers.get(i, self.lives[i].node)  # what is hidden from autograd, its maker keeps
            found = self.formulas.get((saver, _dtype(self.lives[i]), int(self.lives[i].nbytes)))
            return self._pillar(saver, self.lives[i]), found.pop(0) if found else ""
        if i in self.run.grad_lives:
            return "gradient", ""
        return ("output" if i in self.run.output_lives else "temporary"), ""

    def _pillar(self, node: str, life: Life) -> str:
        op, module = self.ops.get(node, (node, ""))
        packed = life.dtype == torch.uint8 and life.op.startswith("floorplan.")
        saved = Saved(node, op, module, life.shape, life.dtype, 0, "kept", life.op, life.nbytes, life.nbytes)
        return pillar_of(saved, self.model, packed)
