"""The timeline of one step of a graph: predicted by a run on fake tensors, or measured by a real one.

    forward -> loss -> backward -> (replay) -> (optimizer step)

The predicted run walks the graph node by node; the measured one runs its generated code on the tensors
themselves. Block by block they are the same: birth, death, bytes, node, direction, role.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.cost_models import memory
from floorplan.errors import FloorplanError
from floorplan.graph.untouched import undisturbed
from floorplan.layers.fused import FusedConv
from floorplan.layers.replay import capturing
from floorplan.ledger.criterion import Proof
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.losses import Loss
from floorplan.ledger.pillars import pillar_of
from floorplan.ledger.recorder import Saved, op_name
from floorplan.ledger.run import Run, record, run_graph
from floorplan.ledger.step_figures import Replaying
from floorplan.ledger.storage import Life, StorageTracker
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.torch_doors import by_foreach
from floorplan.trees import bytes_of_tensors, storage_key, tensors_in

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params, foreach: torch.optim.Adam(params, lr=1e-3, foreach=foreach),
    "sgd": lambda params, foreach: torch.optim.SGD(params, lr=1e-2, foreach=foreach),
}


def predict_timeline(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    target: Tensor,
    loss: Loss,
    *,
    replays: bool = False,
    optimizer: str | None = None,
    name: str = "",
    proof: Proof | None = None,
) -> StepTimeline:
    """Every storage of one step at these sizes, from one run on fake tensors; values are not read.

    optimizer: "adam", "sgd", or None for a step that ends with its gradients (Adam's moments are then
    counted by formula). proof: gives the kept storages their formulas.
    """
    given, end = (*inputs, target), _Ending(gm, replays, optimizer)
    with capturing(gm, replays):
        fakes = concrete_fakes(gm, given)
        run = run_graph(fakes, hooks=False, backward=True, loss=loss, after=end, named=True)
    return _timeline(gm, run, end, given, name, proof)


def measure_timeline(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    target: Tensor,
    loss: Loss,
    *,
    replays: bool = False,
    optimizer: str | None = None,
    name: str = "",
    proof: Proof | None = None,
) -> StepTimeline:
    """The same from a real step; parameters, buffers, gradients and the random state are put back."""
    given, end = (*inputs, target), _Ending(gm, replays, optimizer)
    with undisturbed(gm), _same_parameters(gm, optimizer), capturing(gm, replays):
        run = record(gm, given, hooks=False, backward=True, by_node=False, loss=loss, after=end, named=True)
    return _timeline(gm, run, end, given, name, proof)


def call_timeline(
    step: Callable[[Callable[[str, str], None]], Any],
    apart: Iterable[Tensor],
    *,
    name: str = "",
    gradients: Callable[[], Iterable[Tensor]] = tuple,
) -> StepTimeline:
    """Every storage of any call, on real tensors or inside a FakeTensorMode that the caller has entered.

    step: called with enter(node, direction), by which it may tell what runs next. apart: tensors that are not
    its own. gradients: read when it has returned; what else is alive then is an output.
    """
    with StorageTracker(apart) as tracker:
        held = step(tracker.enter)
    lives, keys = tracker.timeline.lives, {storage_key(t) for t in gradients()}
    grads = {index for key, index in tracker.alive.items() if key in keys}
    ends = set(tracker.alive.values())
    del held

    def of(i: int) -> tuple[str, str]:
        return ("gradient" if i in grads else "output" if i in ends else "temporary"), ""

    for i in ends:
        lives[i].died = None
    blocks = _blocks(lives, range(len(lives)), of)
    return StepTimeline(name, blocks, len(blocks))


def allocated_peak(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    target: Tensor,
    loss: Loss,
    *,
    replays: bool = False,
    optimizer: str | None = None,
) -> int:
    """Bytes that CUDA's allocator gives out at most during one step, above what it gave before.

    It also counts workspaces inside kernels, and the state of an optimizer, which this step makes.
    FloorplanError where the model is not on a CUDA device.
    """
    device = next((t.device for t in [*gm.parameters(), *gm.buffers()]), torch.device("cpu"))
    if device.type != "cuda":
        raise FloorplanError(f"allocated peak: the model is on {device}; only CUDA's allocator counts, move it there")
    # Before anything is counted, libraries load and take their workspaces.
    measure_timeline(gm, inputs, target, loss, replays=replays, optimizer=optimizer)
    end = _Ending(gm, replays, optimizer)
    with undisturbed(gm), _same_parameters(gm, optimizer), capturing(gm, replays):
        for t in [*gm.parameters(), *gm.buffers()]:
            t.grad = None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        out = gm(*inputs)
        total, held = loss(out, target), [t.detach() for t in tensors_in(out)]
        del out
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        del total
        end(gm, tuple(inputs), StorageTracker())
        del held
        for b in gm.buffers():  # a replay leaves gradients on the projections
            b.grad = None
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)


@dataclass
class _Ending:
    """What follows the backward: a replay, an optimizer step, both or neither."""

    gm: fx.GraphModule  # the real one: which kernels an optimizer takes depends on its tensors
    replays: bool
    optimizer: str | None
    apart: dict[int, int] = field(default_factory=dict)  # storages of the optimizer's state -> bytes

    def __post_init__(self) -> None:
        if self.optimizer not in (None, *_OPTIMIZERS):
            raise FloorplanError(f"optimizer {self.optimizer}: not known; use {', '.join(_OPTIMIZERS)}")

    def kept(self, model: nn.Module) -> list[Tensor]:
        """dL/dq of every site, for the replay."""
        return Replaying().kept(model) if self.replays else []

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], tracker: StorageTracker) -> None:
        if self.replays:
            Replaying()(model, inputs, tracker)
        trained = _trained(model, self.replays)
        if self.optimizer is None or not trained:
            return
        tracker.enter("optimizer", "optimizer")
        foreach = by_foreach(_trained(self.gm, self.replays))
        self._step(_OPTIMIZERS[self.optimizer](trained, foreach), tracker)

    def _step(self, optimizer: torch.optim.Optimizer, tracker: StorageTracker) -> None:
        optimizer.step()
        for t in (t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)):
            if (index := tracker.alive.get(storage_key(t))) is not None:
                self.apart[index] = int(t.untyped_storage().nbytes())


def _trained(model: nn.Module, replays: bool) -> list[Tensor]:
    """What the optimizers step: trainable parameters, and projections whose gradient is replayed."""
    sites = [m for m in model.modules() if isinstance(m, FusedConv) and m.rank] if replays else []
    projections = {id(m.P): m.P for m in sites if m.P is not None}
    return [*(p for p in model.parameters() if p.requires_grad), *projections.values()]


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


def _timeline(
    gm: fx.GraphModule, run: Run, end: _Ending, given: Sequence[Any], name: str, proof: Proof | None
) -> StepTimeline:
    roles, formulas = _Roles(gm, run), _Formulas(proof)
    lives = run.timeline.lives

    def of(i: int) -> tuple[str, str]:
        role, saver = roles.of(i)
        return role, formulas.of(saver, lives[i]) if saver else ""

    blocks = _blocks(lives, [i for i in range(len(lives)) if i not in end.apart], of)
    return StepTimeline(name, blocks, len(blocks), _apart(gm, end, given))


def _blocks(lives: Sequence[Life], chosen: Sequence[int], of: Callable[[int], tuple[str, str]]) -> tuple[Block, ...]:
    """The chosen storages, renumbered by births; `of` gives role and formula."""
    births, blocks = [lives[i].born for i in chosen], []
    for born, i in enumerate(chosen):
        life = lives[i]
        # Which of two storages is let go first between two births differs, and changes nothing.
        died = len(chosen) if life.died is None else bisect_left(births, life.died)
        blocks.append(
            Block(
                born,
                died,
                int(life.nbytes),
                life.node,
                life.direction,
                life.op,
                tuple(map(int, life.shape)),
                str(life.dtype).removeprefix("torch."),
                *of(i),
            )
        )
    return tuple(blocks)


def _apart(gm: nn.Module, end: _Ending, given: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    optimizer = sum(end.apart.values())
    if end.optimizer is None:
        optimizer = memory.optimizer_state(bytes_of_tensors(_trained(gm, end.replays)))
    state = bytes_of_tensors([*gm.parameters(), *gm.buffers()])
    return ("model", state), ("optimizer", optimizer), ("batch", bytes_of_tensors(list(tensors_in(tuple(given)))))


class _Roles:
    """Why each storage of a run is there."""

    def __init__(self, gm: fx.GraphModule, run: Run) -> None:
        self.run, self.lives = run, run.timeline.lives
        calls = {n.name: n for n in gm.graph.nodes}
        self.ops = {name: (op_name(n, gm), str(n.target) if n.op == "call_module" else "") for name, n in calls.items()}

    def of(self, i: int) -> tuple[str, str]:
        """(role, the node that keeps it or "")."""
        if i in self.run.saved_lives:
            saver = self.run.keepers.get(i, self.lives[i].node)  # what is hidden from autograd, its maker keeps
            return self._pillar(saver, self.lives[i]), saver
        if i in self.run.grad_lives:
            return "gradient", ""
        return ("output" if i in self.run.output_lives else "temporary"), ""

    def _pillar(self, node: str, life: Life) -> str:
        op, module = self.ops.get(node, (node, ""))
        packed = life.dtype == torch.uint8 and life.op.startswith("floorplan.")
        saved = Saved(node, op, module, life.shape, life.dtype, 0, "kept", life.op, life.nbytes, life.nbytes)
        return pillar_of(saved, packed)


class _Formulas:
    """Formulas of a proof by the node that keeps, dtype and bytes; each is given out once."""

    def __init__(self, proof: Proof | None) -> None:
        self.left: dict[tuple[str, str, int], list[str]] = {}
        once = {e.storage: e for e in reversed(proof.kept)} if proof else {}
        for e in sorted(once.values(), key=lambda e: e.storage):
            self.left.setdefault((e.node, e.dtype, e.nbytes), []).append(e.expr)

    def of(self, saver: str, life: Life) -> str:
        """The formula of a storage that `saver` keeps, "" if the proof has none."""
        found = self.left.get((saver, str(life.dtype).removeprefix("torch."), int(life.nbytes)))
        return found.pop(0) if found else ""
