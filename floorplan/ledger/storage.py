"""Follow every storage that a run allocates, real or fake, from birth to death.

A TorchDispatchMode sees each op's results; a weak reference on the storage object tells when the last
owner let go. Nothing here knows what any op saves.
"""

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from floorplan import torch_doors as doors
from floorplan.ledger.kernels import as_really_run

READ_DEVICE = torch.ops.prim.device.default  # .device of a fake


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
    direction: str = "forward"  # forward, loss, backward, replay, optimizer


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
        return max(accumulate(change))


class StorageTracker(doors.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every storage born under it, with the node and direction that was entered last.

    What is ignored (model state, inputs) counts from the op on that gives it another size.

    Autograd numbers its nodes as it makes them, so a number tells which graph node's backward runs.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self.node, self.direction = "", "forward"
        self._entered: list[tuple[int, str]] = []  # (autograd's next number then, node)
        self._forward_end = 0
        # Storages are held, not their tensors, which may change theirs: a freed key would be given to one that counts.
        self._held = {doors.storage_key(t): t.untyped_storage() for t in ignore}
        self._ignored = {key: s.nbytes() for key, s in self._held.items()}
        self.alive: dict[int, int] = {}

    def enter(self, node: str, direction: str = "forward") -> None:
        """What follows belongs to `node`, its backward too if this is forward or loss."""
        self.node, self.direction = node, direction
        if direction in ("forward", "loss"):
            self._entered.append((doors.next_number(), node))
        elif direction == "backward":
            self._forward_end = doors.next_number()

    def maker_of(self, number: int) -> str | None:
        """The graph node that made autograd's node of that number; None if it is not from this forward."""
        at = bisect_right(self._entered, number, key=lambda e: e[0]) - 1
        return self._entered[at][1] if at >= 0 and number < self._forward_end else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_DEVICE and isinstance(args[0], doors.FakeTensor):
            return args[0].fake_device
        if self.direction == "backward" and (running := doors.running_number()) is not None:
            name = self.maker_of(running)  # gradients are added up, and left on leaves, by the last one
            self.node = self.node if name is None else name
        if func is doors.READ_NUMBER and self.direction == "optimizer" and isinstance(args[0], doors.FakeTensor):
            return 1.0  # how many steps were taken: no size depends on it
        out = as_really_run(func, args, kwargs or {})
        for t in doors.tree_iter(out):
            if isinstance(t, Tensor):
                self._see(t, str(func))
        return out

    def _see(self, t: Tensor, op: str) -> None:
        storage, key = t.untyped_storage(), doors.storage_key(t)
        if key in self._ignored:
            if _written(storage.nbytes()) == _written(self._ignored[key]):
                return
            if key in self.alive:  # resized once more
                self.timeline.lives[self.alive[key]].nbytes = storage.nbytes()
        if key in self.alive:
            return
        line, shape, way = self.timeline, tuple(t.shape), self.direction
        self.alive[key] = len(line.lives)
        line.lives.append(Life(line.events, storage.nbytes(), self.node, op, shape, t.dtype, direction=way))
        line.events += 1
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        if (index := self.alive.pop(key, None)) is not None:
            self.timeline.lives[index].died = self.timeline.events
            self.timeline.events += 1


def _written(size: Any) -> Any:
    """A size as it is written now, to be compared without a guard."""
    return getattr(getattr(size, "node", None), "expr", size)


def bytes_of_tensors(ts: Sequence[Tensor]) -> int:
    """Of distinct tensors."""
    once = {id(t): t.numel() * t.element_size() for t in ts}
    return sum(once.values())
