"""One way to run a step: what runs, what is watched, on fake tensors or for real.

    run(Step(gm, inputs), Watch(hooks=True))               a forward and backward on fakes, saved tensors by node
    run(Step(model, inputs, target, loss), fake=False)     a real step; buffers, gradients, random state put back

Autograd itself is the oracle. A graph runs node by node under `saved_tensors_hooks`; each saved tensor
is recorded with the node that saved it, its storage and its size. A census of the storages still alive
after the forward catches what was hidden from the hooks.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import ReadsValues, TraceError, fault_of_sizes
from floorplan.graph.untouched import undisturbed, unwritten
from floorplan.layers.layer import model_state
from floorplan.layers.replay import Replay, capturing, replayed
from floorplan.ledger.fakes import Fakes, concrete_fakes
from floorplan.ledger.kernels import quiet_fakes, symbolic_kernels
from floorplan.ledger.losses import Loss
from floorplan.ledger.marks import keepers_of, marked
from floorplan.ledger.recorder import Recorder, Saved
from floorplan.ledger.recurrent import fused_lstm
from floorplan.ledger.storage import StorageTracker, Timeline
from floorplan.torch_doors import storage_key, tensors_in, wants_values

Drive = Callable[[nn.Module, tuple[Any, ...], StorageTracker], Any]  # a whole step in its own way


@dataclass(frozen=True)
class Step:
    """What runs: a forward, and its backward, on these inputs."""

    model: nn.Module
    inputs: tuple[Any, ...]
    target: Any = None  # what the loss compares with
    loss: Loss | None = None  # None: the sum of all differentiable outputs
    backward: bool = True
    replays: bool = False  # a MemFLoRA-SG step: the forward again, for the projections' gradients
    autocast: torch.dtype | None = None
    drive: Drive | None = None  # runs all of it instead, given the model, all arguments and the tracker

    @property
    def given(self) -> tuple[Any, ...]:
        """The caller's batch: inputs, and the target of a loss."""
        return self.inputs if self.loss is None and self.target is None else (*self.inputs, self.target)

    @property
    def forward(self) -> "Step":
        """The step up to its loss."""
        return replace(self, backward=False)


@dataclass(frozen=True)
class Watch:
    """What is looked at besides the storages of the step, which always are."""

    hooks: bool = False  # fills `saved`; in-place errors surface only without, as in training
    nodes: bool = True  # a GraphModule is walked node by node; else it runs as its generated code
    writes: bool = False  # fills `spoiled`: looks for saved tensors that are overwritten
    keepers: bool = False  # fills `keepers`; generated code then tells its nodes too
    within: Callable[[StorageTracker], AbstractContextManager[Any]] | None = None  # a mode of the caller's own


@dataclass(frozen=True)
class Run:
    """What was seen of one step."""

    saved: tuple[Saved, ...]
    timeline: Timeline
    saved_lives: frozenset[int]  # storages (numbers in the timeline) alive for the backward
    grad_lives: frozenset[int]  # storages that end as .grad
    refcount_peak: int = 0  # most that tensors saved and not yet used and leaf gradients add up to
    spoiled: tuple[str, str] | None = None  # (node that saved a tensor, node that then overwrote it)
    output_lives: frozenset[int] = frozenset()  # storages of what the model returned
    keepers: Mapping[int, str] = field(default_factory=dict)  # storage alive for the backward -> who saved it


def run(step: Step, watch: Watch | None = None, fake: bool | Fakes = True) -> Run:
    """Run a step once: on fakes of its sizes, on those given, or (False) for real, all put back afterwards.

    Every `.grad` is None when it begins.
    """
    watch = watch or Watch()
    if fake is False:
        with undisturbed(step.model), unwritten(step.model):
            return _once(step, watch, step.model, step.given)
    fakes = fake if isinstance(fake, Fakes) else concrete_fakes(step.model, step.given)
    symbolic = symbolic_kernels() if fakes.env is not None else nullcontext()
    with quiet_fakes(), fused_lstm(), fakes.mode, symbolic:
        return _once(step, watch, fakes.gm, fakes.inputs)


def observe(step: Step, watch: Watch) -> Run:
    """A run on fakes; a real one if the model reads values."""
    try:
        return run(step, watch)
    except ReadsValues:
        return run(step, watch, fake=False)


def _once(step: Step, watch: Watch, model: nn.Module, given: tuple[Any, ...]) -> Run:
    state = model_state(model)
    tracker = StorageTracker([*state, *tensors_in(given)])
    recorder = Recorder(tracker, state, list(tensors_in(given)), watch.hooks and step.backward, watch.writes)
    _drop_grads(state)
    own = watch.within(tracker) if watch.within is not None else nullcontext()
    with _young_garbage(), tracker, own, capturing(model, step.replays), recorder.gradients(model):
        if step.drive is None:
            ends = _autograd(step, watch, model, given, recorder)
        else:
            held = step.drive(model, given, tracker)
            ends = Run((), tracker.timeline, frozenset(), frozenset(), output_lives=frozenset(tracker.alive.values()))
            del held
    grads = _lives_of([t.grad for t in state if t.grad is not None], tracker)
    _drop_grads(state)
    for i in ends.output_lives:  # a training step holds its outputs to the end
        tracker.timeline.lives[i].died = None
    return replace(ends, grad_lives=grads, refcount_peak=recorder.most, spoiled=recorder.spoiled)


def _autograd(step: Step, watch: Watch, model: nn.Module, given: tuple[Any, ...], recorder: Recorder) -> Run:
    """Forward, loss, backward and its replay, under autograd."""
    tracker, inputs = recorder.tracker, given[: len(step.inputs)]
    call = _caller(watch, model, recorder)
    device = next((t.device.type for t in model_state(model)), "cpu")
    precision = nullcontext() if step.autocast is None else torch.autocast(device, step.autocast)
    with recorder.hooks() if watch.hooks else nullcontext(), precision:
        tracker.enter("")
        out = call(*inputs)
        del call  # an interpreter holds what it has computed
        tracker.enter("loss", "loss")
        outputs = _lives_of(tensors_in(out), tracker)
        total = None if step.loss is None else step.loss(out, given[-1])
    total = _total(out) if step.loss is None else total
    del out
    saved = recorder.census(total, watch.hooks)
    tracker.enter("loss", "backward")
    keepers = keepers_of(total, tracker) if watch.keepers else {}
    if step.backward and total is not None and total.requires_grad:
        _differentiate(total)
    del total
    if step.replays and step.backward:
        saved |= _lives_of([m.gq for m in replayed(model) if m.gq is not None], tracker)
        _replay(model, inputs, tracker)
    return Run(tuple(recorder.saved), tracker.timeline, frozenset(saved), frozenset(), 0, None, outputs, keepers)


def _caller(watch: Watch, model: nn.Module, recorder: Recorder) -> Callable[..., Any]:
    if not isinstance(model, fx.GraphModule):
        return model
    if watch.nodes:
        recorder.describe(model)
        return _Walker(model, recorder, watch.writes).run
    return marked(model, recorder.tracker.enter) if watch.keepers else model


def _replay(model: nn.Module, inputs: tuple[Any, ...], tracker: StorageTracker) -> None:
    """The end of a MemFLoRA-SG step."""
    tracker.enter("", "replay")
    if isinstance(model, fx.GraphModule):
        model = marked(model, lambda node: tracker.enter(node, "replay"))
    Replay(model)(*inputs)


class _Walker(fx.Interpreter):
    """Runs the graph, telling the tracker which node is running."""

    def __init__(self, gm: fx.GraphModule, recorder: Recorder, watch: bool) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # it would append lines to the one-line message
        self.recorder, self.watch = recorder, watch
        for n in self.graph.nodes:  # a value that nobody reads dies at once, as in the generated code
            if not n.users and n.op not in ("placeholder", "output"):
                self.user_to_last_uses.setdefault(n, []).append(n)

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.tracker.enter(n.name)
        try:
            result = super().run_node(n)
            if self.watch:
                self.recorder.look(n.name)
            return result
        except Exception as e:
            if wants_values(e):
                raise ReadsValues(f"{n.name}: reads tensor values, which a run without data cannot know") from e
            if isinstance(e, TraceError):
                raise TraceError(f"{n.name}: {e}") from e
            reason = " ".join(str(e).split())[:300]
            todo = "give sizes that fit with --input" if fault_of_sizes(e) else "run the model itself on these inputs"
            raise TraceError(f"{n.name}: {type(e).__name__}: {reason}; {todo}") from e


@contextmanager
def _young_garbage() -> Iterator[None]:
    """Let the collector look at what the run makes, not at every object of every imported module."""
    free = gc.get_freeze_count() == 0
    if free:
        gc.freeze()
    try:
        yield
    finally:
        if free:
            gc.unfreeze()


def _differentiate(loss: Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:200]
        raise TraceError(f"backward: {reason}; the model cannot be trained as it stands") from e


def _drop_grads(state: list[Tensor]) -> None:
    for t in state:
        t.grad = None


def _lives_of(tensors: Iterable[Tensor], tracker: StorageTracker) -> frozenset[int]:
    """The storages of tensors, in the timeline's numbers."""
    keys = map(storage_key, tensors)
    return frozenset(tracker.alive[k] for k in keys if k in tracker.alive)


def _total(out: Any) -> Tensor | None:
    total = None
    for t in (t for t in tensors_in(out) if t.requires_grad):
        part = (torch.view_as_real(t) if t.is_complex() else t).sum()
        total = part if total is None else total + part
    return total
