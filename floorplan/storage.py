"""Follow every storage that a run allocates, real or fake, from birth to death.

A TorchDispatchMode sees each op's results; a weak reference on the storage object tells when the last
owner let go. Nothing here knows what any op saves.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from floorplan.kernels import as_really_run


def storage_key(t: Tensor) -> int:
    """Identity of the storage behind t, valid while it is alive."""
    return int(t.untyped_storage()._cdata)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers (dataclass outputs too)."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from tensors_in(dict(vars(leaf)))


@dataclass
class Life:
    """One storage: when it was born and died (event numbers), what made it, its bytes."""

    born: int
    nbytes: Any  # int, or SymInt on symbolic fakes
    node: str
    op: str
    shape: tuple[Any, ...]
    dtype: torch.dtype
    died: int | None = None


@dataclass
class Timeline:
    """All storages of a run; `model state` and caller's inputs are not in it."""

    lives: list[Life] = field(default_factory=list)
    events: int = 0

    def peak(self, among: Iterable[int] | None = None) -> int:
        """Largest number of bytes alive at once, over all storages or those numbered in `among`."""
        chosen = self.lives if among is None else [self.lives[i] for i in among]
        change = [0] * (self.events + 2)
        for life in chosen:
            change[life.born] += life.nbytes
            if life.died is not None:
                change[life.died] -= life.nbytes
        best = now = 0
        for c in change:
            now += c
            best = max(best, now)
        return best


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every storage born under it. `where` is read at each op to name the node."""

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self.node = ""
        # The tensors are held, or a freed key could be given to a storage that must be counted.
        self._held = list(ignore)
        self._ignored = {storage_key(t) for t in self._held}
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = as_really_run(func, args, kwargs or {})
        for t in tree_iter(out):
            if isinstance(t, Tensor):
                self._see(t, str(func))
        return out

    def _see(self, t: Tensor, op: str) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self.alive or key in self._ignored:
            return
        line = self.timeline
        self.alive[key] = len(line.lives)
        line.lives.append(Life(line.events, storage.nbytes(), self.node, op, tuple(t.shape), t.dtype))
        line.events += 1
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        index = self.alive.pop(key, None)
        if index is not None:
            self.timeline.lives[index].died = self.timeline.events
            self.timeline.events += 1


def model_state(model: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]
