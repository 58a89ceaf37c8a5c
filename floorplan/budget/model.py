"""What a plan works on: a request's settings, the model adapted at one rank, and steps under autograd beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from floorplan.budget.clock import FITTED, Clock, Machines, anchored
from floorplan.budget.net import Costed, Net
from floorplan.budget.report import PlanRow
from floorplan.budget.work import Worked, step_work
from floorplan.cost_models.memory import optimizer_state
from floorplan.cost_models.peaks import Span
from floorplan.errors import FloorplanError
from floorplan.graph.trace import Traced
from floorplan.graph.untouched import undisturbed
from floorplan.layers.adapter import adapter_rank
from floorplan.layers.layer import model_state
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.inputs import filled, resized
from floorplan.ledger.kernels import on_fakes
from floorplan.ledger.losses import Loss, Named, Shared, as_loss, loss_named, spelled, target_like, ungraded
from floorplan.ledger.run import Step
from floorplan.ledger.storage import bytes_of_tensors
from floorplan.methods.catalogue import Plan, recorded
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Subject
from floorplan.step.studied import studied
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.run import step_timeline
from floorplan.torch_doors import tensors_in


@dataclass(frozen=True)
class Objective:
    """What a step trains by: a loss, and an example of its target, which a loss by name need not have."""

    loss: Loss
    target: Any = None

    @property
    def name(self) -> str:
        """The loss in words."""
        return spelled(self.loss)

    @property
    def rows(self) -> int | None:
        """Samples of the target; None if there is none."""
        return next((len(t) for t in tensors_in(self.target) if t.dim()), None)

    def target_of(self, returned: Any, inputs: Sequence[Any]) -> Any:
        """The target, with a row for every row of the inputs; made of what the model returns where none was given."""
        if self.target is None and isinstance(self.loss, Named):
            return target_like(returned, inputs, self.loss.name)
        batch = next((len(t) for t in tensors_in(tuple(inputs)) if t.dim()), 0)
        other = next((t for t in tensors_in(self.target) if t.dim() and len(t) != batch), None)
        if other is not None:
            why = f"{list(other.shape)} for {batch} samples of the inputs"
            raise FloorplanError(f"target: {why}; give one row a sample")
        return self.target


def objective(loss: str | Loss = "cross_entropy", target: Any = None) -> Objective:
    """A loss as a user gives it; FloorplanError for one that is not known, or whose target is not."""
    found = Objective(loss_named(loss) if isinstance(loss, str) else as_loss(loss), target)
    if target is None and not isinstance(found.loss, Named):
        raise FloorplanError(f"loss {found.name}: its target is not known; give target=, an example of one")
    if target is not None and not found.rows:
        raise FloorplanError("target: has no row; give a tensor, or tensors, with one row a sample")
    return found


@dataclass(frozen=True)
class Setting:
    """What does not change from rank to rank."""

    subject: Subject
    traced: Traced | None  # its graph; None if it is adapted already
    budget: int
    batch: int | None
    by: Objective
    machines: Machines
    anchors: bool  # whether real steps of two samples set what a call costs


@dataclass(frozen=True)
class Model:
    """The model adapted at one rank, and its constants."""

    gm: fx.GraphModule
    plan: Plan  # as asked; its rank is the model's own
    target: Any
    net: Net
    state: int  # model and optimizer
    sample: int  # bytes of one sample of the caller's batch

    @property
    def rank(self) -> int:
        """Of its adapters."""
        return self.plan.options.rank

    def room(self, budget: int, batch: int) -> int:
        """What is left for the step."""
        return budget - self.state - self.sample * batch


def model_at(t: Setting, plan: Plan) -> Model:
    """The model adapted as planned; one that is adapted already stays as it is."""
    s = t.subject
    has = adapter_rank(s.model)
    if has is not None and isinstance(s.model, fx.GraphModule):
        gm, plan = s.model, replace(plan, options=replace(plan.options, rank=has))
    else:
        gm = adapted(s, plan, False, t.traced)[0].gm
        gm.meta["floorplan"] = recorded(plan, s.inputs)
    graph = studied(gm, s.inputs)
    target = t.by.target_of(graph.values[graph.output.name], s.inputs)
    net = Net(graph, target, t.by.loss, Clock(t.machines))
    net.timed(_step_clock(t, net))
    state = model_state(gm)
    if not any(p.requires_grad for p in state):
        raise FloorplanError(f"{s.name}: nothing in it trains; choose other --sites or --train-head")
    trained = bytes_of_tensors([p for p in state if p.requires_grad])
    sample = sum(bytes_of_tensors([v]) for v in tensors_in(resized([*s.inputs, target], 1)))
    return Model(gm, plan, target, net, bytes_of_tensors(state) + optimizer_state(trained), sample)


STREAM = 16  # hidden channels at a time


def streamed(m: Model, t: Setting) -> Model | None:
    """The same with inverted residuals streamed by channels; None if it has none."""
    if m.net.coupled or not m.net.wide:
        return None
    return replace(m, net=Net(m.net.studied, m.target, t.by.loss, m.net.time_of, STREAM))


def _step_clock(t: Setting, net: Net) -> Clock:
    """How this machine runs the straight-line step."""

    def whole(n: int) -> Costed:
        return net.costed(n, 0, (Span(0, len(net.groups) - 1, 0, (0,) * len(net.groups)),))

    step = net.step(net.schedule(whole(FITTED[0])))

    def run(n: int) -> Callable[[], Tensor]:
        given = filled((*net.inputs, net.target), n)
        return lambda: step(*given)

    with undisturbed(net.gm), ungraded(t.by.loss):
        return anchored(t.machines, lambda n: net.work_of(whole(n)), run) if t.anchors else Clock(t.machines)


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
    inputs, loss = t.subject.inputs, Shared(t.by.loss, None, 0).whole
    fakes = concrete_fakes(gm, inputs)
    fakes.mode.allow_non_fake_inputs = True  # a loss of the user's has tensors of its own
    given = (*inputs, t.by.target_of(fakes.forward(), inputs))

    def work(n: int) -> Worked:
        with ungraded(t.by.loss):
            return step_work(sized(n), fakes.on(sized(n).given))

    def sized(n: int) -> Step:
        *some, target = resized(list(given), n)
        return Step(gm, tuple(some), target, on_fakes(loss))

    def step(n: int) -> Callable[[], Tensor]:
        *some, target = filled(given, n)

        def once() -> Tensor:
            value = loss(gm(*some), target)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return once

    with undisturbed(gm), ungraded(t.by.loss):
        clock = anchored(t.machines, work, step) if t.anchors else Clock(t.machines)
    with ungraded(t.by.loss):
        line = step_timeline(sized(batch), fake=fakes.on(sized(batch).given), name=f"{name}, batch {batch}")
    return Reference(name, batch, rank, line, work(batch), clock)
