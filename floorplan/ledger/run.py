"""The ledger: every tensor that autograd keeps, caught by running the graph on fake tensors.

Autograd itself is the oracle. The graph runs node by node under `saved_tensors_hooks`; each saved tensor
is recorded with the node that saved it, its storage and its size. A census of the storages still alive
after the forward catches what was hidden from the hooks.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx, nn

from floorplan.errors import ReadsValues, TraceError
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.kernels import quiet_fakes, symbolic_kernels
from floorplan.ledger.losses import Loss
from floorplan.ledger.marks import keepers_of, marked
from floorplan.ledger.recorder import Recorder, Saved
from floorplan.ledger.recurrent import fused_lstm
from floorplan.ledger.storage import StorageTracker, Timeline
from floorplan.trees import model_state, storage_key, tensors_in


class After(Protocol):
    """What follows the backward in a step."""

    def kept(self, model: nn.Module) -> list[Tensor]:
        """Tensors that the backward left for it."""

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], tracker: StorageTracker) -> None:
        """Run it, telling the tracker what runs; gradients go to `.grad`."""


@dataclass(frozen=True)
class Run:
    """One forward (and backward) of a graph or a module."""

    saved: tuple[Saved, ...]
    timeline: Timeline
    saved_lives: frozenset[int]  # storages (numbers in the timeline) alive for the backward
    grad_lives: frozenset[int]  # storages that end as .grad
    refcount_peak: int = 0  # most that tensors saved and not yet used and leaf gradients add up to
    spoiled: tuple[str, str] | None = None  # (node that saved a tensor, node that then overwrote it)
    output_lives: frozenset[int] = frozenset()  # storages of what the model returned
    keepers: Mapping[int, str] = field(default_factory=dict)  # storage alive for the backward -> who saved it


class _Walker(fx.Interpreter):
    """Runs the graph, telling the tracker which node is running."""

    def __init__(self, gm: fx.GraphModule, recorder: "Recorder", watch: bool) -> None:
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
            reason = " ".join(str(e).split())[:300]
            raise TraceError(f"{n.name}: {type(e).__name__}: {reason}; give sizes that fit with --input") from e


_READS = ("DataDependent", "DynamicOutputShape", "_local_scalar_dense", ".numpy() is not supported")


def wants_values(e: Exception) -> bool:
    """Whether a run on fake tensors failed because it asked for the content of one."""
    return any(word in f"{type(e).__name__} {e}" for word in _READS)


def run_graph(
    fakes: Fakes,
    *,
    hooks: bool,
    backward: bool = False,
    autocast: torch.dtype | None = None,
    watch: bool = False,
    loss: Loss | None = None,
    after: After | None = None,
    named: bool = False,
) -> Run:
    """Run a fake model once and record what it keeps; `watch` looks for overwritten saved tensors."""
    symbolic = symbolic_kernels() if fakes.env is not None else nullcontext()
    with quiet_fakes(), fused_lstm(), fakes.mode, symbolic:
        return record(
            fakes.gm,
            fakes.inputs,
            hooks=hooks,
            backward=backward,
            autocast=autocast,
            watch=watch,
            loss=loss,
            after=after,
            named=named,
        )


def record(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    hooks: bool,
    backward: bool = False,
    autocast: torch.dtype | None = None,
    by_node: bool = True,
    watch: bool = False,
    loss: Loss | None = None,
    after: After | None = None,
    named: bool = False,
) -> Run:
    """Run `model` once, real or fake; with `by_node` a GraphModule is walked node by node.

    `hooks` fills `saved`; without them only the census counts, and in-place errors surface as they do
    in training. The loss is the sum of all differentiable outputs, or loss(output, inputs[-1]), the last
    input then being the target; `after` ends the step. Every `.grad` is None before and after.
    `named` fills `keepers`, and lets the generated code of a GraphModule tell its nodes where none is walked.
    """
    state = model_state(model)
    tracker = StorageTracker([*state, *tensors_in(inputs)])
    recorder = Recorder(tracker, state, list(tensors_in(inputs)), hooks and backward)
    walk = by_node and isinstance(model, fx.GraphModule)
    call: Callable[..., Any] = _Walker(cast(fx.GraphModule, model), recorder, watch).run if walk else model
    if walk:
        recorder.describe(cast(fx.GraphModule, model))
    elif named and isinstance(model, fx.GraphModule):
        call = marked(model, tracker.enter)
    _drop_grads(model)
    arguments, target = (inputs, None) if loss is None else (inputs[:-1], inputs[-1])
    with _young_garbage(), tracker, recorder.gradients(model):
        with recorder.hooks() if hooks else nullcontext(), _autocast(autocast, state):
            tracker.enter("")
            out = call(*arguments)
            del call  # an interpreter holds what it has computed
            tracker.enter("loss", "loss")
            held = {tracker.alive.get(storage_key(t)) for t in tensors_in(out)} - {None}
            total = None if loss is None else loss(out, target)
        total = _total(out) if loss is None else total
        del out
        saved_lives = recorder.census(total, hooks)
        tracker.enter("loss", "backward")
        keepers = keepers_of(total, tracker) if named else {}
        if backward and total is not None and total.requires_grad:
            _differentiate(total)
        del total
        if after is not None:
            saved_lives |= {tracker.alive[storage_key(t)] for t in after.kept(model)}
            after(model, arguments, tracker)
    grads = _grad_lives(model, tracker)
    _drop_grads(model)
    for i in held:  # a training step holds its outputs to the end
        tracker.timeline.lives[cast(int, i)].died = None
    return Run(
        tuple(recorder.saved),
        tracker.timeline,
        frozenset(saved_lives),
        grads,
        recorder.most,
        recorder.spoiled,
        frozenset(cast(set[int], held)),
        keepers,
    )


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


def _drop_grads(model: nn.Module) -> None:
    for t in model_state(model):
        t.grad = None


def _grad_lives(model: nn.Module, tracker: StorageTracker) -> frozenset[int]:
    keys = [storage_key(t.grad) for t in model_state(model) if t.grad is not None]
    return frozenset(tracker.alive[k] for k in keys if k in tracker.alive)


def _autocast(dtype: torch.dtype | None, state: list[Tensor]) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(next((t.device.type for t in state), "cpu"), dtype)


def _total(out: Any) -> Tensor | None:
    total = None
    for t in (t for t in tensors_in(out) if t.requires_grad):
        part = (torch.view_as_real(t) if t.is_complex() else t).sum()
        total = part if total is None else total + part
    return total
