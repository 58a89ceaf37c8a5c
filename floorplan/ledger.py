"""The ledger: every tensor that autograd keeps, caught by running the graph on fake tensors.

Autograd itself is the oracle. The graph runs node by node under `saved_tensors_hooks`; each saved tensor
is recorded with the node that saved it, its storage and its size. A census of the storages still alive
after the forward catches what was hidden from the hooks.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.errors import ReadsValues, TraceError
from floorplan.kernels import quiet_fakes, symbolic_kernels
from floorplan.recurrent import fused_lstm
from floorplan.storage import Life, StorageTracker, Timeline, model_state, storage_key, tensors_in
from floorplan.symbols import Fakes


@dataclass(frozen=True)
class Saved:
    """One tensor handed to save-for-backward (or found alive without having been)."""

    node: str
    op: str  # what the node calls: "Conv2d", "relu", …
    module: str  # path of the module, "" for a function
    shape: tuple[Any, ...]  # ints, or SymInts on symbolic fakes
    dtype: torch.dtype
    storage: int  # number of its storage within this ledger
    owner: str  # "state", "input", "kept"
    maker: str  # the op that allocated the storage
    nbytes: Any  # of the whole storage
    tensor_bytes: Any  # of this tensor alone
    hidden: bool = False  # alive after the forward, but never seen by the hooks


@dataclass(frozen=True)
class Run:
    """One forward (and backward) of a graph or a module."""

    saved: tuple[Saved, ...]
    timeline: Timeline
    saved_lives: frozenset[int]  # storages (numbers in the timeline) alive for the backward
    grad_lives: frozenset[int]  # storages that end as .grad
    spoiled: tuple[str, str] | None = None  # (node that saved a tensor, node that then overwrote it)


def op_name(node: fx.Node, gm: fx.GraphModule) -> str:
    """Class of a module node, plain name of a function or method."""
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    if callable(node.target):
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target)


class _Walker(fx.Interpreter):
    """Runs the graph, telling the tracker which node is running."""

    def __init__(self, gm: fx.GraphModule, recorder: "_Recorder", watch: bool) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # it would append lines to the one-line message
        self.recorder, self.watch = recorder, watch
        for n in self.graph.nodes:  # a value that nobody reads dies at once, as in the generated code
            if not n.users and n.op not in ("placeholder", "output"):
                self.user_to_last_uses.setdefault(n, []).append(n)

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.tracker.node = n.name
        try:
            result = super().run_node(n)
            if self.watch:
                self.recorder.look(n.name)
            return result
        except Exception as e:
            if any(word in f"{type(e).__name__} {e}" for word in _READS):
                raise ReadsValues(f"{n.name}: reads tensor values, which a run without data cannot know") from e
            reason = " ".join(str(e).split())[:300]
            raise TraceError(
                f"{n.name}: {type(e).__name__}: {reason}; give sizes that fit with --input"
            ) from e


_READS = ("DataDependent", "DynamicOutputShape", "_local_scalar_dense", ".numpy() is not supported")


def run_graph(
    fakes: Fakes, *, hooks: bool, backward: bool = False, autocast: torch.dtype | None = None,
    watch: bool = False,
) -> Run:  # fmt: skip
    """Run a fake model once and record what it keeps; `watch` looks for overwritten saved tensors."""
    symbolic = symbolic_kernels() if fakes.env is not None else nullcontext()
    with quiet_fakes(), fused_lstm(), fakes.mode, symbolic:
        return record(
            fakes.gm, fakes.inputs, hooks=hooks, backward=backward, autocast=autocast, watch=watch
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
) -> Run:
    """Run `model` once, real or fake; with `by_node` a GraphModule is walked node by node.

    `hooks` fills `saved`; without them only the census counts, and in-place errors surface as they do
    in training. The loss is the sum of all differentiable outputs; every `.grad` is None before and after.
    """
    state = model_state(model)
    tracker = StorageTracker([*state, *tensors_in(inputs)])
    recorder = _Recorder(tracker, state, list(tensors_in(inputs)))
    walk = by_node and isinstance(model, fx.GraphModule)
    call: Callable[..., Any] = _Walker(cast(fx.GraphModule, model), recorder, watch).run if walk else model
    if walk:
        recorder.describe(cast(fx.GraphModule, model))
    _drop_grads(model)
    with _young_garbage(), tracker:
        with recorder.hooks() if hooks else nullcontext(), _autocast(autocast, state):
            out = call(*inputs)
        del call  # an interpreter holds what it has computed
        tracker.node = "loss"
        roots = [t for t in tensors_in(out) if t.requires_grad]
        held = {tracker.alive.get(storage_key(t)) for t in tensors_in(out)} - {None}
        loss = _total(roots)
        del out, roots
        saved_lives = recorder.census(loss, hooks)
        if backward and loss is not None:
            tracker.node = "backward"
            _differentiate(loss)
        del loss
    grads = _grad_lives(model, tracker)
    _drop_grads(model)
    for i in held:  # a training step holds its outputs to the end
        tracker.timeline.lives[cast(int, i)].died = None
    return Run(tuple(recorder.saved), tracker.timeline, frozenset(saved_lives), grads, recorder.spoiled)


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
    for p in model.parameters():
        p.grad = None


def _grad_lives(model: nn.Module, tracker: StorageTracker) -> frozenset[int]:
    keys = [storage_key(p.grad) for p in model.parameters() if p.grad is not None]
    return frozenset(tracker.alive[k] for k in keys if k in tracker.alive)


def _autocast(dtype: torch.dtype | None, state: list[Tensor]) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(next((t.device.type for t in state), "cpu"), dtype)


def _total(roots: list[Tensor]) -> Tensor | None:
    total = None
    for t in roots:
        part = (torch.view_as_real(t) if t.is_complex() else t).sum()
        total = part if total is None else total + part
    return total


class _Recorder:
    """Collects Saved records from the hooks and, after the forward, from the census."""

    def __init__(self, tracker: StorageTracker, state: list[Tensor], inputs: list[Tensor]) -> None:
        self.tracker = tracker
        self.owners = {storage_key(t): "input" for t in inputs}
        self.owners.update({storage_key(t): "state" for t in state})
        self.saved: list[Saved] = []
        self.numbers: dict[tuple[str, int], int] = {}
        self.ops: dict[str, tuple[str, str]] = {}
        self.versions: list[tuple[weakref.ref[Tensor], int, str]] = []
        self.spoiled: tuple[str, str] | None = None

    def look(self, node: str) -> None:
        """Notice the first kept tensor that `node` has written to since it was saved."""
        for ref, version, saver in self.versions if self.spoiled is None else ():
            t = ref()
            if t is not None and t._version != version:
                self.spoiled = (saver, node)
                return

    def describe(self, gm: fx.GraphModule) -> None:
        for n in gm.graph.nodes:
            self.ops[n.name] = (op_name(n, gm), str(n.target) if n.op == "call_module" else "")

    def hooks(self) -> AbstractContextManager[Any]:
        # The packed object is the tensor itself, so lifetimes stay as they are without hooks.
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, t: Tensor) -> Tensor:
        key = storage_key(t)
        live = self.tracker.alive.get(key)
        if live is not None:
            self.versions.append((weakref.ref(t), t._version, self.tracker.node))
        self.saved.append(
            Saved(
                self.tracker.node,
                *self.ops.get(self.tracker.node, (self.tracker.node, "")),
                shape=tuple(t.shape),
                dtype=t.dtype,
                storage=self._number(*(("address", key) if live is None else ("life", live))),
                owner=self.owners.get(key, "kept"),
                maker="" if live is None else self.tracker.timeline.lives[live].op,
                nbytes=t.untyped_storage().nbytes(),
                tensor_bytes=t.numel() * t.element_size(),
            )
        )
        return t

    def _number(self, kind: str, index: int) -> int:
        """A storage's number; an address may be used again, a place in the timeline is not."""
        return self.numbers.setdefault((kind, index), len(self.numbers))

    def census(self, loss: Tensor | None, hooked: bool) -> set[int]:
        """Storages alive after the forward, in the timeline's numbers, outputs let go and loss apart.

        With hooks on, those the hooks never saw are recorded as hidden, and what died again with an
        unread result is struck out.
        """
        gc.collect()
        skip = None if loss is None else self.tracker.alive.get(storage_key(loss))
        lives, kept = self.tracker.timeline.lives, set()
        for index in self.tracker.alive.values():
            life = lives[index]
            if index == skip or life.nbytes == 0:
                continue
            kept.add(index)
            if hooked and ("life", index) not in self.numbers:
                self.saved.append(self._hidden(life, index))
        dead = {n for (kind, i), n in self.numbers.items() if kind == "life" and lives[i].died is not None}
        self.saved = [s for s in self.saved if s.storage not in dead]
        return kept

    def _hidden(self, life: Life, index: int) -> Saved:
        op, module = self.ops.get(life.node, (life.node, ""))
        number = self._number("life", index)
        return Saved(life.node, op, module, life.shape, life.dtype, number, "kept", life.op,
                     life.nbytes, life.nbytes, hidden=True)  # fmt: skip
