"""An adapted model as units that a schedule is put together from, each in the forms that it can run in.

Profiles   the step with its units in one form, at any part size, from fake runs at few
Net        units, heads and works by part size and form; what a schedule of them takes
Costed     one schedule at one batch: bytes and seconds
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from floorplan.budget.clock import TimeOf
from floorplan.budget.profile import FITTED, LinearProfile, Profile, cuts, joints, linear, profiled, sized
from floorplan.budget.whole import WholeLoss
from floorplan.budget.work import Worked
from floorplan.cost_models.peaks import Composer, Head, Span, Unit, sizes
from floorplan.errors import FloorplanError
from floorplan.layers.fused import FusedConv
from floorplan.ledger.fakes import Fakes, concrete_fakes
from floorplan.ledger.inputs import resized
from floorplan.ledger.losses import Loss, as_loss, weights_of
from floorplan.step.compile import Schedule, Step, compiled
from floorplan.step.program import Builder
from floorplan.step.region import seeded
from floorplan.step.runner import needs_whole
from floorplan.step.samples import refuse_coupled
from floorplan.step.stream_rules import wide
from floorplan.step.studied import Studied

ODD = 13  # samples, no multiple of any number of slices


@dataclass(frozen=True)
class Costed:
    """A schedule of one batch, by the closed form."""

    batch: int
    micro: int
    stages: tuple[Span, ...]
    peak: int
    seconds: float


class Profiles:
    """The step with its units in one form, profiled at any part size: by runs at two, and at few small ones."""

    def __init__(self, step: Step, fakes: Fakes, given: Sequence[Any]) -> None:
        self.step, self.fakes, self.given = step, fakes, given
        self.done: dict[int, Profile] = {}

    @cached_property
    def linear(self) -> LinearProfile | None:
        """The line through two runs."""
        return linear(self.run(FITTED[0]), self.run(FITTED[1]), FITTED)

    def run(self, size: int) -> Profile:
        """A fake run at one size."""
        if size not in self.done:
            *some, target = resized(list(self.given), size)
            self.done[size] = profiled(self.step, self.fakes.on([*some, *weights_of(self.step.loss), target]))
        return self.done[size]

    @cached_property
    def holds(self) -> bool:
        """Whether the line holds at every size: sums in slices are even at multiples of their number alone."""
        if self.linear is None:
            return False
        odd, fitted = self.run(ODD), self.linear.at(ODD)
        return (odd.events, odd.nbytes) == (fitted.events, fitted.nbytes)

    def at(self, size: int) -> Profile:
        """The profile at a size. Layouts of one sample are ambiguous: that one is always run."""
        if self.linear is None or size == 1 or (size % FITTED[0] and not self.holds):
            return self.run(size)
        return self.linear.at(size)


class Net:
    """An adapted model as units, each in several forms."""

    def __init__(self, s: Studied, target: Any, loss: str | Loss, time_of: TimeOf, stream: int = 0) -> None:
        self.studied, self.target, self.loss, self.time_of, self.stream = s, target, as_loss(loss), time_of, stream
        self.gm, self.inputs = s.gm, s.inputs
        self.wide = wide(s)
        self.coupled = self._coupled()
        self.cuts = [] if self.coupled else self._cuts()
        called = [(n, s.gm.get_submodule(str(n.target))) for n in s.nodes if n.op == "call_module"]
        adapted = [n for n, m in called if isinstance(m, FusedConv) and m.rank]
        sites = tuple(n.name for n in adapted)
        known = s.values
        same = tuple(n.name for n in adapted if known[n.all_input_nodes[0].name].shape == known[n.name].shape)
        self.kinds = list(dict.fromkeys((((), ()), (sites, ()), (sites, same))))
        self.whole: WholeLoss | None = None
        self.profiles = self._profiled()
        common = set.intersection(*(set(joints(r.run(FITTED[0]))) for r in self.profiles))
        edges = [-1, *sorted(common), len(self.cuts)]
        self.groups = [(a + 1, b) for a, b in zip(edges, edges[1:], strict=False)]
        self.sites = self._sites(sites)
        whole = self.whole
        self.compose = Composer(len(self.groups), self.unit, self._head, whole and (lambda n: whole.at(n)[0]))
        self.exact: dict[Costed, Any] = {}
        self.sized = lru_cache(None)(lambda size, kind: sized(self.profiles[kind].at(size), self.groups))
        # Predicted times, of a unit and of a stage.
        self.seconds = lru_cache(None)(lambda *of: self.work(*of).seconds(self.time_of))
        self.forms, self.stage_seconds = lru_cache(None)(self._forms), lru_cache(None)(self._stage_seconds)

    def timed(self, time_of: TimeOf) -> None:
        """Predict times by another clock from now on."""
        self.time_of = time_of
        for known in (self.forms, self.seconds, self.stage_seconds):
            known.cache_clear()

    def _cuts(self) -> list[str]:
        """Nodes behind which stages end; none if a program cannot end in one of them."""
        found = [n for n in cuts(self.studied) if not self.stream or n not in self.wide]
        try:
            Builder(self.studied, Schedule(stages=tuple((n, 0) for n in found), stream=self.stream)).build()
        except FloorplanError:
            return []
        return found

    def _coupled(self) -> str:
        """Why a batch cannot be taken apart; "" if it can."""
        try:
            refuse_coupled(self.gm, self.inputs)
        except FloorplanError as e:
            return str(e)
        return ""

    def step(self, schedule: Schedule) -> Step:
        """The compiled step of a schedule."""
        return compiled(self.studied, self.loss, replace(schedule, stream=self.stream))

    def _profiled(self) -> list[Profiles]:
        stages, given = tuple((n, 0) for n in self.cuts), (*self.inputs, self.target)
        steps = [self.step(Schedule(stages=stages, branches=b, reuse=r)) for b, r in self.kinds]
        fakes = concrete_fakes(self.gm, given)  # of the model as it lies now: in the steps' layout
        fakes.mode.allow_non_fake_inputs = True  # a loss of the user's has tensors of its own
        if needs_whole(self.loss, None):
            self.whole = w = WholeLoss(steps[0], fakes, resized(given, FITTED[0]))
            w.at(FITTED[0])
            self.entire = Profiles(steps[0], fakes, given)
            steps, given = [replace(step, loss=seeded, mean=False) for step in steps], (*self.inputs, w.seeds)
        return [Profiles(step, fakes, given) for step in steps]

    def _head(self, size: int, entire: bool) -> Head:
        """What follows the last unit: the loss itself, or in the second of two passes its seed."""
        alone = entire and self.whole is not None
        return sized(self.entire.run(size), self.groups).head if alone else self.sized(size, 0).head

    def _sites(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Adapted sites of each unit."""
        ends = [self.cuts[last] for _, last in self.groups[:-1]]
        out: list[list[str]] = [[]]
        for n in self.studied.nodes:
            out[-1] += [n.name] if n.name in sites else []
            if n.name in ends:
                out.append([])
        return [tuple(s) for s in out]

    def unit(self, k: int, size: int, kind: int) -> Unit:
        """One unit at a part size, in one of its forms."""
        return self.sized(size, kind).units[k]

    def work(self, k: int, size: int, kind: int, twice: bool = False) -> Worked:
        """What a unit computes in both directions, forward once more in two passes; k = number of units: the head."""
        if k == len(self.groups) and self.whole is not None and not twice:
            return self.entire.run(size).work[-1][0]
        forward, backward = self.sized(size, kind).work[k]
        return forward.plus(backward).plus(forward, twice and k < len(self.groups))

    def _forms(self, policy: str, size: int) -> tuple[int, ...]:
        """The form of each unit for parts of `size`: the merged one, the fastest, or the smallest."""

        def cost(k: int, kind: int) -> float:
            if policy == "fast":
                return self.seconds(k, size, kind)
            u = self.unit(k, size, kind)
            return max(u.owned, u.back.owned_later if u.back else 0)

        if policy == "merged":
            return (0,) * len(self.groups)
        kinds = range(len(self.kinds))
        return tuple(min(kinds, key=lambda f: (cost(k, f), f)) if s else 0 for k, s in enumerate(self.sites))

    def costed(self, batch: int, micro: int, stages: Sequence[Span]) -> Costed:
        """What a schedule takes."""
        run = tuple(stages)
        return Costed(batch, micro, run, self.compose.peak(batch, micro, run), self._step_seconds(batch, micro, run))

    def _step_seconds(self, batch: int, micro: int, stages: tuple[Span, ...]) -> float:
        twice = self.compose.twice(batch, micro, stages)
        total, moved = (self.whole.at(batch)[1].seconds(self.time_of), 6.0) if self.whole and twice else (0.0, 4.0)
        for n, times in sizes(batch, micro):
            for k, s in enumerate(stages):
                crossing = 0 if k == 0 else self.unit(s.first, n, 0).enters
                total += times * self.time_of("all", (0.0, moved * crossing, 1.0 if crossing else 0.0))
                for size, q in sizes(n, s.size):
                    total += times * q * self.stage_seconds(s, size, k == len(stages) - 1, twice)
        return total

    def _stage_seconds(self, s: Span, size: int, last: bool, twice: bool) -> float:
        found = sum(self.seconds(k, size, s.forms[k], twice) for k in range(s.first, s.last + 1))
        return found + (self.seconds(len(self.groups), size, 0, twice) if last else 0.0)

    def twice(self, f: Costed) -> bool:
        """Whether a schedule takes two passes."""
        return self.compose.twice(f.batch, f.micro, f.stages)

    def work_of(self, f: Costed) -> Worked:
        """What the whole step computes."""
        twice = self.twice(f)
        total = self.whole.at(f.batch)[1] if self.whole and twice else Worked()
        for n, times in sizes(f.batch, f.micro):
            for i, s in enumerate(f.stages):
                for size, q in sizes(n, s.size):
                    parts = [self.work(k, size, s.forms[k], twice) for k in range(s.first, s.last + 1)]
                    parts += [self.work(len(self.groups), size, 0, twice)] if i == len(f.stages) - 1 else []
                    for p in parts:
                        total = total.plus(p, times * q)
        return total

    def schedule(self, f: Costed) -> Schedule:
        """The schedule as compile_step takes it."""
        kinds = [s.forms[k] for s in f.stages for k in range(s.first, s.last + 1)]
        picked: list[list[str]] = [[], []]
        for names, kind in zip(self.sites, kinds, strict=True):
            for which, chosen in enumerate(self.kinds[kind]):
                picked[which] += [n for n in names if n in chosen]
        stages, last = tuple((self.cuts[self.groups[s.last][1]], s.size) for s in f.stages[:-1]), f.stages[-1].size
        branches, reuse = map(tuple, picked)
        return Schedule(f.micro, stages, last, branches=branches, stream=self.stream, reuse=reuse)
