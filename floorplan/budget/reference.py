"""Programs that a plan is held against: a graph's step under autograd, in bytes and seconds."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx

from floorplan.budget.clock import Clock, anchored
from floorplan.budget.model import Setting
from floorplan.budget.report import PlanRow
from floorplan.budget.work import Worked, step_work
from floorplan.graph.untouched import undisturbed
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.inputs import filled, resized
from floorplan.ledger.losses import LOSSES, target_like
from floorplan.ledger.run import Step
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.run import step_timeline


@dataclass(frozen=True)
class Reference:
    """A step under autograd at one batch."""

    name: str
    batch: int
    rank: int | None
    timeline: StepTimeline
    work: Worked
    clock: Clock

    @property
    def seconds(self) -> float:
        """Predicted time of the step."""
        return self.work.seconds(self.clock)

    def row(self, base: float | None) -> PlanRow:
        """In the report, its time beside `base` seconds."""
        line, state = self.timeline, dict(self.timeline.state)
        kept, model = max(line.kept_live, default=0), state["model"] + state["optimizer"]
        ratio, macs = self.seconds / base if base else None, round(self.work.macs)
        return PlanRow(self.name, self.batch, self.rank, line.peak, kept, model, state["batch"], ratio, macs)


def reference(t: Setting, gm: fx.GraphModule, batch: int, name: str, rank: int | None = None) -> Reference:
    """The step of `batch` samples from a fake run; few real steps may say how this machine runs it."""
    inputs, loss = t.subject.inputs, LOSSES[t.loss]
    fakes = concrete_fakes(gm, inputs)
    given = (*inputs, target_like(fakes.forward(), inputs, t.loss))

    def work(n: int) -> Worked:
        return step_work(sized(n), fakes.on(sized(n).given))

    def sized(n: int) -> Step:
        *some, target = (resized(v, n) for v in given)
        return Step(gm, tuple(some), target, loss)

    def step(n: int) -> Callable[[], Tensor]:
        *some, target = filled(given, n)

        def once() -> Tensor:
            value = loss(gm(*some), target)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return once

    line = step_timeline(sized(batch), fake=fakes.on(sized(batch).given), name=f"{name}, batch {batch}")
    with undisturbed(gm):
        clock = anchored(t.machines, work, step) if t.anchors else Clock(t.machines)
    return Reference(name, batch, rank, line, work(batch), clock)
