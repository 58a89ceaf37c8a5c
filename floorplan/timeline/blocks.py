"""The timeline of one training step: every storage it allocates, with bytes, birth, death, node and direction.

    requested_peak      = max over events of the bytes alive      (model, optimizer state, caller's batch apart)
    training_state_peak = max of what is kept and of gradients alone, + model + optimizer state

An event is the birth of a storage: nothing else can raise what is alive. A plain value: solvers, pictures
and exports read it and know nothing of graphs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

DIRECTIONS = ("forward", "loss", "backward", "optimizer", "replay")
UNKEPT = ("output", "temporary")  # roles that are no training state
TOP = 5  # contributors that are printed


@dataclass(frozen=True)
class Block:
    """One storage: alive from event `born` up to, and without, event `died`."""

    born: int
    died: int
    nbytes: int
    node: str  # the graph node that allocated it; "" outside any
    direction: str  # one of DIRECTIONS
    op: str  # "aten.convolution.default"
    shape: tuple[int, ...]
    dtype: str  # "float32"
    role: str  # a pillar for what is kept for the backward; "gradient", "output" or "temporary"


@dataclass(frozen=True)
class StepTimeline:
    """All storages of one step, in order of birth; `state` is what stands apart, by name."""

    name: str
    blocks: tuple[Block, ...]
    events: int
    state: tuple[tuple[str, int], ...] = ()  # ("model", bytes), ("optimizer", …), ("batch", …)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes alive during each event."""
        return _alive_at(self.blocks, self.events)

    @cached_property
    def kept_live(self) -> tuple[int, ...]:
        """Bytes of what is kept for the backward and of gradients during each event."""
        return _alive_at([b for b in self.blocks if b.role not in UNKEPT], self.events)

    @property
    def peak(self) -> int:
        """The requested peak, in bytes."""
        return max(self.live, default=0)

    @property
    def peak_at(self) -> int:
        """The first event at which the peak is reached."""
        return self.live.index(self.peak) if self.live else 0

    @property
    def training_state_peak(self) -> int:
        """Model, optimizer state, and the most that is kept for the backward together with gradients."""
        return max(self.kept_live, default=0) + sum(n for k, n in self.state if k != "batch")

    @property
    def training_state_at(self) -> int:
        """The first event at which the training state is largest."""
        return self.kept_live.index(max(self.kept_live)) if self.kept_live else 0

    @property
    def total(self) -> int:
        """Peak and all that stands apart."""
        return self.peak + sum(n for _, n in self.state)

    def alive(self, event: int) -> list[Block]:
        """What is alive at an event, largest first."""
        return sorted((b for b in self.blocks if b.born <= event < b.died), key=lambda b: -b.nbytes)

    def by_node(self, event: int, kept: bool = False) -> list[tuple[str, str, int]]:
        """(node, direction, bytes) alive at an event, largest first; `kept` leaves temporaries and outputs out."""
        bytes_of: Counter[tuple[str, str]] = Counter()
        for b in self.alive(event):
            if not kept or b.role not in UNKEPT:
                bytes_of[b.node, b.direction] += b.nbytes
        return [(node, direction, n) for (node, direction), n in bytes_of.most_common()]

    def __str__(self) -> str:
        lines = [f"{self.name or 'one step'}: {len(self.blocks)} storages"]
        lines += self._instant("requested peak", self.peak, self.peak_at, kept=False)
        lines += self._instant("training-state peak", self.training_state_peak, self.training_state_at, kept=True)
        apart = ", ".join(f"{name} {n:,}" for name, n in self.state)
        return "\n".join([*lines, *([f"apart: {apart}; in all {self.total:,}"] if apart else [])])

    def _instant(self, name: str, nbytes: int, event: int, kept: bool) -> list[str]:
        if not self.blocks:
            return [f"{name} {nbytes:,}"]
        last = next((f": {b.direction} of {b.node or '-'}" for b in self.blocks if b.born == event), "")
        lines = [f"{name} {nbytes:,} at event {event} of {self.events}{last}"]
        return lines + [f"  {n:>15,}  {where or '-'} ({way})" for where, way, n in self.by_node(event, kept)[:TOP]]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        figures = {"name": self.name, "events": self.events, "peak": self.peak, "peak_at": self.peak_at}
        return {**figures, "state": dict(self.state), "blocks": [vars(b) for b in self.blocks]}


def _alive_at(blocks: Sequence[Block], events: int) -> tuple[int, ...]:
    change = [0] * (events + 1)
    for b in blocks:
        change[b.born] += b.nbytes
        change[b.died] -= b.nbytes
    return tuple(accumulate(change[:events]))


def intervals(blocks: Sequence[Block]) -> list[tuple[int, int, int]]:
    """(born, died, bytes) of each block, for solvers."""
    return [(b.born, b.died, b.nbytes) for b in blocks]
