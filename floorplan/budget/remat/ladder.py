"""Rematerialisation: keep less of what cannot reach the floor, and compute it again in the backward, exactly.

    every tensor that autograd keeps is kept, or computed from what is kept        min cut: bytes + price * work
    candidates: prices of work * divisions of the graph that no computation crosses
    each candidate runs one step on fake tensors; one that raises the requested peak is dropped

What is left is a ladder: every rung costs more work than the one before and has no higher peak. A budget
picks the first rung that fits, so a smaller budget never has a higher peak.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from floorplan.budget.remat.graph import apply
from floorplan.budget.remat.study import Value, out_of_place, sources
from floorplan.cost_models.mincut import Cut, boundaries, cheapest_cut
from floorplan.ledger.losses import Loss
from floorplan.ledger.run import Run, Step, run

PRICES = (1.0, 0.25, 1 / 16, 1 / 64, 1 / 256, 0.0)  # bytes that one operation is taken to be worth
_UNIT = 1024  # prices are rounded to this part of a byte
_SMALL = 2000  # what is below this share of all that is kept is left alone


class Problem:
    """The graph's values as numbers for the minimum cut, in the order of the nodes: bytes, work, what is needed."""

    def __init__(self, gm: fx.GraphModule, values: dict[str, Value]) -> None:
        self.values = values
        nodes = list(gm.graph.nodes)
        self.names = [n.name for n in nodes]
        self.at = {name: i for i, name in enumerate(self.names)}
        self.inputs = [[self.at[s] for s in sources(n, values)] for n in nodes]
        owners = dict.fromkeys(o for name in self.names for o in values[name].saves if o)
        needed = [o for o in owners if not values[o].written and values[o].nbytes]
        small = sum(values[o].nbytes for o in needed) // _SMALL
        self.small = {name for name in self.names if values[name].owner == name and values[name].nbytes < small}
        self.needed = [self.at[o] for o in needed if o not in self.small]
        made = [values[name] for name in self.names]
        self.sizes = [v.nbytes * _UNIT if v.owner == v.node and not v.written else None for v in made]
        self.fixed = [self._fixed(n) for n in nodes]

    def _fixed(self, n: fx.Node) -> bool:
        """Whether a node's value is only to be had by keeping it."""
        v = self.values[n.name]
        overwritten = bool(v.owner and self.values[v.owner].written)
        return bool(v.refused) or overwritten or n.op in ("placeholder", "output") or n.name in self.small

    def candidates(self, prices: Sequence[float]) -> Iterator[frozenset[str]]:
        """The nodes to compute again, for every price and division of the graph."""
        for crossing in self._divisions():
            for price in prices:
                cut = self._cut(price, crossing)
                if cut is not None and cut.recomputed:
                    yield frozenset(self.names[i] for i in cut.recomputed)

    def _cut(self, price: float, crossing: set[int]) -> Cut | None:
        costs = [round(self.values[name].cost * price * _UNIT) for name in self.names]
        prices = [None if self.fixed[i] or i in crossing else cost for i, cost in enumerate(costs)]
        try:
            return cheapest_cut(self.sizes, self.inputs, self.needed, prices)
        except ValueError:  # a view that no computation may cross, of memory that may not be kept
            return None

    def _divisions(self) -> Iterator[set[int]]:
        """The values that cross the divisions: none, then those of ever smaller parts."""
        last: dict[int, int] = {}  # number of a value that has memory of its own -> that of the last node that reads it
        for i, us in enumerate(self.inputs):
            for u in us:
                owner = self.values[self.names[u]].owner
                last[self.at[owner] if owner else u] = i
        crossing = [[u for u, end in last.items() if u < i <= end] for i in range(len(self.names))]
        sizes = [sum(self.values[self.names[u]].nbytes for u in us) for us in crossing]
        needed = set(self.needed)
        weights = [self.values[name].nbytes if i in needed else 0 for i, name in enumerate(self.names)]
        limit = sum(weights)
        yield set()
        while limit > max(weights, default=0):
            limit //= 2
            yield {u for i in boundaries(weights, sizes, limit) for u in crossing[i]}

    def refusals(self) -> Iterator[str]:
        """Why a value that is kept is never computed again, by node."""
        for i in self.needed:
            v = self.values[self.names[i]]
            if v.refused:
                yield f"{v.node}: kept, not computed again: {v.refused}"
        for v in self.values.values():
            if v.written and any(v.node in w.saves for w in self.values.values()):
                yield f"{v.node}: kept, not computed again: {v.written} overwrites it"


@dataclass(frozen=True)
class Rung:
    """One way to run the step: what it computes again, and the bytes it then needs."""

    requested_peak: int
    saved: int
    extra_macs: int
    apart: bool  # each reader has its values computed for itself: more work, less held at once
    recomputed: frozenset[str]  # nodes


@dataclass(frozen=True)
class Remat:
    """A graph that computes the same bits and keeps less, and what that costs. Bytes are of one step."""

    module: fx.GraphModule
    ladder: tuple[Rung, ...]  # rung 0 is the graph as it was
    rung: int
    notes: tuple[str, ...]

    @property
    def peak_after(self) -> int:
        """Requested peak now."""
        return self.ladder[self.rung].requested_peak


@dataclass(frozen=True)
class Ladder:
    """Every way found to run the step, by rising work and falling peak; a budget picks one."""

    rungs: tuple[Rung, ...]
    source: fx.GraphModule
    plain: fx.GraphModule  # source, out of place
    values: dict[str, Value]

    def fit(self, budget: int | None = None) -> Remat:
        """The first rung whose requested peak fits `budget` bytes; the last one if none does, or without one."""
        fits = [i for i, r in enumerate(self.rungs) if budget is not None and r.requested_peak <= budget]
        at = fits[0] if fits else len(self.rungs) - 1
        rung, problem = self.rungs[at], Problem(self.plain, self.values)
        module = apply(self.plain, self.values, rung.recomputed, rung.apart)[0] if at else self.source
        notes = []
        if budget is not None and rung.requested_peak > budget:
            notes.append(f"budget of {budget:,} bytes not met: the lowest peak found is {rung.requested_peak:,}")
        if len(self.rungs) == 1:
            notes.append("nothing computed again: no candidate lowers the requested peak")
        return Remat(module, self.rungs, at, (*notes, *problem.refusals()))


def climb(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    loss: Loss | None = None,
    target: Tensor | None = None,
    prices: Sequence[float] = PRICES,
) -> Ladder:
    """All rungs for one graph at these sizes, for any number of budgets of what the step itself allocates.

    loss(output, target): as in training; None for the sum of all outputs. What `fit` gives shares parameters with
    `gm`, which is left as it is.
    """
    plain, values = out_of_place(gm, tuple(inputs))
    step = Step(gm, tuple(inputs), target, loss)
    tried = [_rung(run(step), 0, frozenset(), False)]

    def attempt(again: frozenset[str], apart: bool) -> None:
        if not any((r.recomputed, r.apart) == (again, apart) for r in tried):
            twin, macs = apply(plain, values, again, apart)
            tried.append(_rung(run(replace(step, model=twin)), macs, again, apart))

    for again in Problem(plain, values).candidates(prices):
        attempt(again, False)
    for rung in _ladder(tried)[1:]:
        attempt(rung.recomputed, True)
    return Ladder(_ladder(tried), gm, plain, values)


def _rung(run: Run, macs: int, again: frozenset[str], apart: bool) -> Rung:
    saved = sum(int(run.timeline.lives[i].nbytes) for i in run.saved_lives)
    return Rung(int(run.timeline.peak()), saved, macs, apart, again)


def _ladder(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Rungs by rising work, without those that need more memory than one with less work."""
    ladder = [rungs[0]]
    for r in sorted(rungs[1:], key=lambda r: (r.extra_macs, len(r.recomputed), r.requested_peak, r.saved)):
        last = ladder[-1]
        if (r.requested_peak, r.saved) < (last.requested_peak, last.saved):
            ladder.append(r)
    return tuple(ladder)
