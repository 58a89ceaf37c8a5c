"""The choice among schedules: the least, the largest batch, the fastest that fits, and what one more sample takes."""

from collections.abc import Sequence

from floorplan.budget.model import Model
from floorplan.budget.net import Costed, Net
from floorplan.budget.search import grown, more
from floorplan.cost_models.peaks import Span
from floorplan.ledger.inputs import resized
from floorplan.step.compile import Step
from floorplan.step.timeline import predict
from floorplan.timeline.blocks import StepTimeline

ALIKE = 1.01  # times that the model does not tell apart
TRIED = 4  # schedules whose exact peak is looked at, should a closed form be off


def smallest(m: Model, batch: int) -> Costed:
    """The schedule that allocates least: one sample at a time, or the whole batch where samples are coupled."""
    net, micro = m.net, 0 if m.net.coupled or batch == 1 else 1
    n = micro or batch
    stages = [(Span(0, len(net.groups) - 1, 0, net.forms(policy, n)),) for policy in ("merged", "small")]
    return min((net.costed(batch, micro, s) for s in stages), key=lambda f: f.peak)


def largest(m: Model, budget: int) -> int:
    """The largest batch that fits; 0 if none does."""

    def fits(b: int) -> bool:
        return smallest(m, b).peak <= m.room(budget, b)

    if not fits(1):
        return 0
    low, high = 1, max(2, (budget - m.state) // max(m.sample, 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fastest(net: Net, found: Sequence[Costed], room: int) -> Costed | None:
    """The fastest that fits, grown to its largest part sizes, the exact run asked in doubt."""
    fits = [f for f in found if f.peak <= room]
    least = min((f.seconds for f in fits), default=0.0) * ALIKE
    for f in sorted(fits, key=lambda f: (max(f.seconds, least), len(f.stages), f.peak))[:TRIED]:
        best = grown(net, f, room)
        if exact(net, best)[1].peak <= room:
            return best
    return None


def exact(net: Net, f: Costed) -> tuple[Step, StepTimeline]:
    """The compiled step of a schedule and its exact timeline on fakes; alike micro-batches are run three times."""
    if f in net.exact:
        return net.exact[f]  # type: ignore[no-any-return]
    step = net.step(net.schedule(f))
    n = f.batch
    if f.micro and n > 4 * f.micro:
        n = 3 * f.micro + n % f.micro
    given = tuple(resized(v, n) for v in net.inputs)
    net.exact[f] = found = step, predict(step, given, resized(net.target, n))
    return found


def one_more_than(m: Model, choice: Costed, free: bool) -> int | None:
    """Least total with one more sample: in a part of the step, or in the batch where it is `free`."""
    tried = more(m.net, choice)
    if free:
        tried.append(smallest(m, choice.batch + 1))
    return min((f.peak + m.state + m.sample * f.batch for f in tried), default=None)
