"""Rematerialisation: keep less of what cannot reach the floor, and compute it again in the backward, exactly.

    every tensor that autograd keeps is kept, or computed from what is kept        min cut: bytes + price * work
    candidates: prices of work * divisions of the graph that no computation crosses
    each candidate runs one step on fake tensors; one that raises the requested peak is dropped

What is left is a ladder: every rung costs more work than the one before and has no higher peak. A budget
picks the first rung that fits, so a smaller budget never has a higher peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from floorplan.budget.remat.graph import apply
from floorplan.budget.remat.problem import PRICES, Problem
from floorplan.budget.remat.study import Value, out_of_place
from floorplan.ledger.losses import Loss
from floorplan.ledger.run import Run, Step, run


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

    @property
    def extra_macs(self) -> int:
        """Multiply-adds that the backward computes again."""
        return self.ladder[self.rung].extra_macs


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
