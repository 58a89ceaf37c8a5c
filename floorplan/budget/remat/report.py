"""`floorplan remat`: adapt a model, let what cannot reach the floor be computed again, and say what that costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from floorplan.budget.remat.ladder import Remat, Rung, climb
from floorplan.cost_models import memory
from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapter_rank
from floorplan.layers.layer import model_state
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import loss_named, target_for
from floorplan.ledger.run import Step
from floorplan.ledger.step_figures import step_figures
from floorplan.ledger.storage import bytes_of_tensors
from floorplan.methods.catalogue import Options, Plan, recorded
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import DEFAULT_BATCH, Shapes, Source, subject_of
from floorplan.passes.lossy_activations import approximate
from floorplan.render import Cell, Report, Table, nbytes, versions
from floorplan.torch_doors import tensors_in


@dataclass(frozen=True)
class RematReport(Report):
    """The rungs found, the one taken, and a real step of it where it was measured. Bytes of one step."""

    heading = "{.name}, computed again"

    name: str
    batch: int
    loss: str
    budget: int | None
    state: int  # model, optimizer state and the caller's batch, which the budget counts too
    result: Remat
    measured: int | None
    lossy: tuple[str, ...]  # nodes whose gradient is approximate, and by how much
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the budget is met; True without one."""
        return self.budget is None or self.result.peak_after + self.state <= self.budget

    @property
    def module(self) -> fx.GraphModule:
        """The graph that computes again."""
        return self.result.module

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`, schema floorplan.remat/1."""
        rungs = [{**vars(r), "recomputed": sorted(r.recomputed)} for r in self.result.ladder]
        head = {"schema": "floorplan.remat/1", "model": self.name, "batch": self.batch, "loss": self.loss}
        asked = {"budget": self.budget, "state": self.state}
        found = {"rung": self.result.rung, "fits": self.fits, "measured": self.measured, "lossy": list(self.lossy)}
        notes = [*self.notes, *self._words()]
        return {**head, **asked, **found, "versions": versions(), "rungs": rungs, "notes": notes}

    def _words(self) -> list[str]:
        """The search's notes, but for its own budget, which leaves out what stands apart."""
        return [n for n in self.result.notes if not n.startswith("budget of ")]

    def parts(self) -> Iterator[str | Table]:
        """The rungs, the one taken, and what is approximate."""
        yield from (f"{self.name}: one step, batch {self.batch}, loss {self.loss}", "")
        header = [Cell("taken", ""), "rung", "requested peak", "total", "saved", "extra MACs", "nodes again"]
        rows = [self._cells(i, r) for i, r in enumerate(self.result.ladder)]
        yield Table("rungs", header, rows, range(1, 7))
        if self.measured is not None:
            gap = self.result.peak_after - self.measured
            yield f"measured requested peak: {self.measured:,} B, difference {gap:,}"
        yield from (f"LOSSY: {line}" for line in self.lossy)
        yield from (f"note: {n}" for n in dict.fromkeys((*self.notes, *self._words())))
        if self.budget is not None:
            yield f"budget {self.budget:,} B: {'met' if self.fits else 'not met, nothing was written'}"

    def _cells(self, i: int, r: Rung) -> list[Any]:
        taken, again = i == self.result.rung, len(r.recomputed)
        amounts = [nbytes(n) for n in (r.requested_peak, r.requested_peak + self.state, r.saved)]
        return [Cell(int(taken), "->" * taken), Cell(i, str(i)), *amounts, r.extra_macs, Cell(again, str(again))]


def remat(
    model: nn.Module | str,
    inputs: Any = None,
    budget: int | None = None,
    *,
    batch: int = 8,
    rank: int = 2,
    method: str = "memflora",
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    loss: str = "cross_entropy",
    lossy_bits: int | None = None,
    measured: bool = False,
    shapes: Shapes | None = None,
    weights: str | None = None,
    allow: Sequence[str] = (),
    trust: bool = False,
) -> RematReport:
    """Adapt a model (or take an adapted one) and fit its step into `budget` bytes by computing again.

    budget: counts model, Adam's moments and the caller's batch too; None for the lowest peak found. lossy_bits:
    1 to 8 bits an element for the derivatives of smooth activations, which makes gradients approximate; None: exact.
    The order of 0.1, remat(model, budget, inputs), is understood too.
    """
    if isinstance(inputs, int | float) or (inputs is None and not isinstance(budget, int | float)):
        inputs, budget = budget, inputs
    if not isinstance(budget, int | float | None):
        raise FloorplanError(f"remat: a budget of type {type(budget).__name__}; give a number of bytes")
    source = Source(model, inputs, batch, shapes, weights, allow, trust)
    plan = Plan(method, Options(rank, sites, seed, train_head))
    return recomputed(source, plan, budget, loss, lossy_bits, measured)


def recomputed(
    source: Source, plan: Plan, budget: int | None, loss: str, lossy_bits: int | None, measured: bool
) -> RematReport:
    """`remat` of a request."""
    run, batch = loss_named(loss), DEFAULT_BATCH if source.batch is None else source.batch
    s = subject_of(replace(source, batch=2))
    gm = s.model
    if adapter_rank(gm) is None or not isinstance(gm, fx.GraphModule):
        traced, _ = adapted(s, plan, verified=True)
        gm = traced.gm
        gm.meta["floorplan"] = recorded(plan, s.inputs)
    named: list[str] = []
    if lossy_bits is not None:
        gm, found = approximate(gm, lossy_bits)
        named = [f"{f.node}: {f.note}" for f in found if not f.refused]
    gm.train()
    given = filled(s.inputs, batch)
    target = target_for(gm, given, loss)
    trained = bytes_of_tensors([p for p in gm.parameters() if p.requires_grad])
    state = bytes_of_tensors(model_state(gm)) + memory.optimizer_state(trained)
    state += bytes_of_tensors(list(tensors_in((*given, target))))  # the batch stands there too
    room = None if budget is None else max(budget - state, 0)
    result = climb(gm, given, loss=run, target=target).fit(room)
    result.module.meta.update(gm.meta)
    again = Step(result.module, given, target, run)
    real = step_figures(again, fake=False).requested_peak if measured else None
    return RematReport(s.name, batch, loss, budget, state, result, real, tuple(named), s.notes)
