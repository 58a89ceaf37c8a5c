"""What autograd is handed to keep: the saved-tensor hooks of one run, and a census after its forward."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.graph import decide
from floorplan.ledger.storage import Life, StorageTracker
from floorplan.torch_doors import saving, storage_key, version_of


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
    line: str = ""  # "net.py:12" where no node is known


def op_name(node: fx.Node, gm: fx.GraphModule) -> str:
    """Class of a module node, plain name of a function or method."""
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    return getattr(node.target, "__name__", str(node.target))


def ops_of(gm: fx.GraphModule) -> dict[str, tuple[str, str]]:
    """Node name -> (what it calls, the module's path or "")."""
    return {n.name: (op_name(n, gm), str(n.target) if n.op == "call_module" else "") for n in gm.graph.nodes}


class Recorder:
    """Collects Saved records from the hooks and, after the forward, from the census."""

    def __init__(
        self, tracker: StorageTracker, state: list[Tensor], inputs: list[Tensor], counts: bool, writes: bool = False
    ) -> None:
        self.tracker = tracker
        # The tracker, told to ignore these, holds their storages: no key of theirs is given to another.
        self.owners = {storage_key(t): "input" for t in inputs} | {storage_key(t): "state" for t in state}
        self.saved: list[Saved] = []
        self.numbers: dict[tuple[str, int], int] = {}
        self.ops: dict[str, tuple[str, str]] = {}
        self.counts = counts  # sizes are numbers, and the backward will run
        self.asked = counts or writes
        self.now = self.most = 0
        self.versions: list[tuple[weakref.ref[Tensor], int, str]] = []
        self.spoiled: tuple[str, str] | None = None

    def look(self, node: str) -> None:
        """Notice the first kept tensor that `node` has written to since it was saved."""
        for ref, version, saver in self.versions if self.spoiled is None else ():
            t = ref()
            if t is not None and version_of(t) != version:
                self.spoiled = (saver, node)
                return

    def describe(self, gm: fx.GraphModule) -> None:
        self.ops = ops_of(gm)

    def hooks(self) -> AbstractContextManager[Any]:
        return saving(self._pack, self._unpack)

    @contextmanager
    def gradients(self, model: nn.Module) -> Iterator[None]:
        """Add every leaf gradient to the running count as it is produced."""

        def produced(g: Tensor) -> None:
            self._count(int(g.numel() * g.element_size()))

        leaves = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
        with ExitStack() as hooks:
            for p in leaves if self.counts else ():
                hooks.enter_context(p.register_hook(produced))  # type: ignore[no-untyped-call]
            yield

    def _count(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)

    def _unpack(self, t: Tensor) -> Tensor:
        if self.counts and self.owners.get(storage_key(t)) != "state":
            self._count(-t.numel() * t.element_size())
        return t

    def _pack(self, t: Tensor) -> Any:
        """Note a tensor and hold its storage, as autograd would; the tensor itself only if it will be asked for."""
        key, held, node = storage_key(t), self._held(t), self.tracker.node
        live = self.tracker.alive.get(key)  # state that the forward has resized is alive as well
        owner, size = self.owners.get(key, "kept") if live is None else "kept", t.numel() * t.element_size()
        if self.counts and owner != "state":
            self._count(size)
        if live is not None and isinstance(held, Tensor):
            self.versions.append((weakref.ref(held), version_of(held), node))
        number = self._number("address", key) if live is None else self._number("life", live)
        maker = "" if live is None else self.tracker.timeline.lives[live].op
        op, module = self.ops.get(node, (node, ""))
        whole = t.untyped_storage().nbytes()
        line = "" if node else decide.place(decide.models_frame())
        made = Saved(node, op, module, tuple(t.shape), t.dtype, number, owner, maker, whole, size, line=line)
        self.saved.append(made)
        return held

    def _held(self, t: Tensor) -> Any:
        """An alias, which shares the version: an op that keeps its own result would hold itself for ever."""
        if not self.asked:
            return t.untyped_storage()
        t = t.detach()
        return t if t.is_leaf else t.detach()

    def _number(self, kind: str, index: int) -> int:
        """A storage's number; an address may be used again, a place in the timeline is not."""
        return self.numbers.setdefault((kind, index), len(self.numbers))

    def census(self, loss: Tensor | None, hooked: bool) -> set[int]:
        """Storages alive after the forward, in the timeline's numbers, outputs let go and loss apart.

        With hooks on, those they never saw are recorded as hidden; what died with an unread result is struck out.
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
        number, size = self._number("life", index), life.nbytes
        return Saved(life.node, op, module, life.shape, life.dtype, number, "kept", life.op, size, size, hidden=True)
