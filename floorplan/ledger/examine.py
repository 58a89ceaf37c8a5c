"""The cross-examination of a proof: the model itself, not its graph, at other sizes and for real.

points    far above every constant that its code compares sizes with, far below, the other side of every branch
ledger    at each point, what the model keeps on fakes against the proof's formulas: dtype and bytes of every tensor
for real  once, at the smallest of these points, against the fakes
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import sympy
from torch import Tensor

from floorplan.errors import describe, one_line
from floorplan.graph.copies import clone_structure
from floorplan.graph.untouched import no_memory, untouched
from floorplan.layers.layer import model_state
from floorplan.ledger.criterion import ABOVE_FLOOR, AT_FLOOR, UNPROVEN, Proof, is_workspace
from floorplan.ledger.fakes import Fakes, concrete_fakes
from floorplan.ledger.points import Answer, Axes, Point, holds, said, solutions
from floorplan.ledger.questions import heard
from floorplan.ledger.recorder import Saved
from floorplan.ledger.run import Run, Step, Watch, run
from floorplan.torch_doors import FakeTensor, storage_key, tensors_in

Kept = Counter[tuple[str, int]]  # dtype and bytes of the storage of each tensor kept
HOOKS = Watch(hooks=True, nodes=False)
SAME = "the same tensors, the same formulas"
_PATHS, _TRIES = 24, 3  # paths through a forward's branches; points tried for one of them
_GUILTY = 4  # paths of a model of which nothing good is claimed
_FEW, _MANY = 2, 18  # batches below and above torch's own choice of kernels, which is at 16


def kept_by(saved: tuple[Saved, ...]) -> Kept:
    """What a run kept, scratch of a kernel apart."""
    own = (s for s in saved if s.owner == "kept" and not is_workspace(s))
    return Counter(_kind(s) for s in own if int(s.nbytes))


def _kind(s: Saved) -> tuple[str, int]:
    return str(s.dtype).removeprefix("torch."), int(s.nbytes)


def kept_at(proof: Proof, point: Mapping[str, int]) -> Kept:
    """What the formulas say is kept at a point."""
    values = {sympy.Symbol(k, positive=True, integer=True): sympy.Integer(v) for k, v in point.items()}
    own = (e for e in proof.kept if not e.reason.startswith("a workspace"))
    return Counter((e.dtype, int(e.size.xreplace(values))) for e in own)


@dataclass
class Examination:
    """The model of `step` at other sizes; what was found is in `verdict` and the lines."""

    step: Step  # of the module itself, or of the graph if that is the model
    proof: Proof
    axes: Axes
    asks: bool  # whether its code was seen to ask for sizes, or cannot be seen
    listens: bool = True  # whether it has code of its own, to be heard once
    formulas: bool = True  # whether the proof's sizes are formulas
    other: Point | None = None  # the first point at which other tensors are kept
    verdict: str = ""
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    tried: dict[tuple[int, ...], Kept | None] = field(default_factory=dict)  # None: the model does not run there
    same: list[Point] = field(default_factory=list)  # where the formulas hold
    fakes: Fakes | None = None
    answers: list[Answer] = field(default_factory=list)

    def run(self) -> "Examination":
        """All points, on fakes."""
        self.verdict = self.proof.verdict
        if not self.formulas:
            self.assumptions += self.proof.assumptions
            return self
        if self.asks:
            self._explore()
        self._far()
        if not self.asks and self.answers:  # behind a test that tracing does not pass: isinstance(x, Tensor)
            asked = ", ".join(dict.fromkeys(str(r) for r, _ in self.answers))
            self.notes.append(f"its code asks {one_line(asked, 120)}, which a graph of it follows at these sizes alone")
            self._explore()
        self.assumptions[:0] = map(self._marked, self.proof.assumptions)
        if self.same:
            points = "; ".join(map(said, self.same[:4])) + (f"; {len(self.same) - 4} more" if self.same[4:] else "")
            self.assumptions.append(f"other sizes are as those tried on the model itself: {points}: {SAME}")
        return self

    def _far(self) -> None:
        """Larger and smaller than given, and than every constant that was seen."""
        given, most = self.axes.given, max([0, *(int(c) for r, _ in self.answers for c in r.atoms(sympy.Integer))])
        up, few, down = (self.axes.positions(s) for s in (2, 0.25, 0.5))
        down = few if all(n >= 32 for n in few.values()) else down
        scale = 1 + most // max(1, min(up.values(), default=1))
        up = {k: v * scale for k, v in up.items()} if scale <= 64 else up
        many = {"B": max(_MANY, 2 * given["B"], most + 1)} if "B" in given else {}
        fewer = {"B": _FEW} if "B" in given else {}
        for batch, positions in ((many, up), (fewer, down)):
            if not self.at(given | batch | positions) and positions:
                self.at(given | batch)
                self.at(given | positions)
        for text in self.proof.assumptions:  # guards of kernels about the batch
            guard = _about_batch(text)
            if guard is not None and len({holds(guard, p) for p in (given, *self.same)}) == 1:
                with suppress(StopIteration):
                    self.at(next(solutions([(guard, not holds(guard, given))], given)))

    def _explore(self) -> None:
        """Follow every path through the branches on sizes that the model's code takes."""
        todo: list[list[Answer]] = [[]]
        start = {k: max(v, 2) for k, v in self.axes.given.items()}  # a size of 1 is no symbol
        start = start if self.at(start) else self.axes.given
        done: set[tuple[Answer, ...]] = set()
        paths, most = 0, _PATHS if self.verdict == AT_FLOOR else _GUILTY
        while todo:
            wanted = todo.pop(0)
            points = self._at_which(wanted) if wanted else [start]
            if not points and len(wanted[-1][0].free_symbols) > 1:
                relation, held = wanted[-1]
                self.assumptions.append(f"{relation} is {not held}: no sizes were found at which it is {held}")
            for point in points:
                if wanted and not self.at(point):
                    continue
                if (paths := paths + 1) > most:
                    return self._doubt(f"its code has more branches on sizes than {most} runs can follow")
                found = heard(self.step, self.axes, point)
                if found.numbers:
                    self._doubt_number(found.numbers[0])
                if found.failed:
                    self._doubt(f"its code could not be followed with sizes as symbols: {one_line(found.failed, 120)}")
                self.answers += found.answers
                if found.numbers or found.failed:
                    return None  # nothing that other paths keep would change that
                for i, (relation, held) in enumerate(found.answers):
                    other = [*found.answers[:i], (relation, not held)]
                    if tuple(other) not in done:
                        done.add(tuple(other))
                        todo.append(other)
                break

    def _at_which(self, wanted: list[Answer]) -> list[Point]:
        """Points at which relations answer as wanted; a size of 1 is no symbol, so nothing is heard of it."""
        given = self.axes.given
        larger = list(_some(p for p in solutions(wanted, given) if min(p.values(), default=2) > 1))
        return larger or list(_some(solutions(wanted, given)))

    def _doubt(self, why: str) -> None:
        """Nothing is proved of what cannot be followed."""
        if self.verdict == AT_FLOOR:
            self.verdict = UNPROVEN
        if why not in self.notes:
            self.notes.append(f"not proved for other sizes: {why}")

    def _doubt_number(self, made: str) -> None:
        """Of a size that became a number, a text or a key."""
        self._doubt(f"{made}, and what it does with that at other sizes is not known")

    def at(self, point: Point) -> bool:
        """Whether the model runs at a point; what it keeps there is held against the formulas."""
        key = tuple(point.values())
        if key in self.tried or point == self.axes.given:
            return self.tried.get(key, True) is not None
        try:
            listened = self._listened(point)
            saved = self._run(point).saved if listened is None else listened
        except Exception as e:  # whatever a model raises, it does not take this size
            self.tried[key] = None
            self.assumptions.append(f"the model does not run at {said(point)} ({one_line(e, 100)})")
            return False
        self.tried[key] = kept = kept_by(saved)
        want = kept_at(self.proof, self.proof.symbols | point)
        if kept != want:
            self._differs(point, saved, kept, want)
        else:
            self.same.append(point)
        return True

    def _listened(self, point: Point) -> tuple[Saved, ...] | None:
        """What is kept at a point whose sizes are symbols to the model's code, once; None: that was not possible."""
        if self.asks or not self.listens:
            return None
        self.listens = False
        found = heard(self.step, self.axes, point, hooks=True)
        self.answers += found.answers
        if found.numbers or "unhashable" in found.failed:
            self._doubt_number(found.numbers[0] if found.numbers else "its code looks a size up in a table")
        return None if found.failed else found.saved

    def _differs(self, point: Point, saved: tuple[Saved, ...], kept: Kept, want: Kept) -> None:
        more = next((s for s in saved if _kind(s) in kept - want), None)
        if more is not None:
            where, sizes = more.line or more.node or more.maker, [int(n) for n in more.shape]
            what = f"{where} keeps {more.dtype} {sizes}, {int(more.nbytes):,} bytes, which the proof does not have"
        else:
            dtype, nbytes = next(iter(want - kept))
            what = f"a {dtype} tensor of {nbytes:,} bytes, which the proof has, is not kept"
        self.other = self.other or point
        self.notes.append(f"at {said(point)} other tensors are kept: {what}")
        if self.verdict != ABOVE_FLOOR:
            self.verdict = UNPROVEN

    def _run(self, point: Point) -> Run:
        """The model's own forward at a point, on fakes that hold the state it began with."""
        if self.fakes is None:
            self.fakes = concrete_fakes(self.step.model, self.step.inputs)
        state = model_state(self.fakes.gm)
        sizes = {storage_key(t): t.untyped_storage().nbytes() for t in state}
        with self.fakes.mode:
            inputs = self.axes.at(self.step.inputs, point)
        fakes = replace(self.fakes, gm=clone_structure(self.fakes.gm), inputs=inputs)
        with no_memory(self.step.model):
            found = run(self.step.forward, HOOKS, fakes)
        same = all(sizes[storage_key(t)] == t.untyped_storage().nbytes() and t.is_leaf for t in state)
        self.fakes = self.fakes if same else None
        return found

    def for_real(self, kept: Kept) -> None:
        """One forward on real tensors at the smallest size that the model takes, against the fakes.

        kept: by the fakes at the sizes that were given.
        """
        model, given = self.step.model, tuple(self.axes.given.values())
        if any(t.device.type == "meta" or isinstance(t, FakeTensor) for t in (*model_state(model), *self._tensors())):
            return
        if not self.tried:
            self._smaller()
        ran = {given: kept} | {k: v for k, v in self.tried.items() if v is not None}
        least = min(ran, key=prod)
        point = dict(zip(self.axes.given, least, strict=True))
        inputs = self.step.inputs if least == given else self.axes.at(self.step.inputs, point, filled=True)
        try:
            with untouched(model), warnings.catch_warnings(action="ignore"):
                found = kept_by(run(replace(self.step, inputs=inputs), HOOKS, fake=False).saved)
        except Exception as e:
            return self._doubt(f"its forward fails on real tensors at {said(point)} ({describe(e, 120)})")
        if found != ran[least]:
            dtype, nbytes = next(iter((found - ran[least]) or (ran[least] - found)))
            more = "keeps" if found - ran[least] else "does not keep"
            self.verdict = UNPROVEN
            self.notes.append(
                f"on real tensors at {said(point)} the model {more} {dtype} of {nbytes:,} bytes, unlike on fake ones: "
                "it asks whether it is traced, or a branch of it depends on values"
            )

    def _tensors(self) -> Iterator[Tensor]:
        return tensors_in(self.step.inputs)

    def _smaller(self) -> None:
        """Note what the model keeps at a smaller size, where there are no formulas to hold that against."""
        given = self.axes.given
        for positions in (self.axes.positions(0.5), {}):
            point = given | positions | ({"B": _FEW} if given.get("B", 0) > _FEW else {})
            with suppress(Exception):
                self.tried[tuple(point.values())] = kept_by(self._run(point).saved)
                return

    def _marked(self, text: str) -> str:
        """An assumption about the batch, with the batch that was tried on its other side."""
        guard = _about_batch(text)
        if guard is None:
            return text
        given = self.axes.given.get("B", 0)
        other = next((p["B"] for p in self.same if holds(guard, p) is False), None)
        if holds(guard, {"B": given}) is False:  # the symbolic run was on the other side
            guard, other = ~guard, next((p["B"] for p in self.same if holds(guard, p)), None)
        return f"{guard}" + ("" if other is None else f" (tried at B = {other} too: {SAME})")


def _some(points: Iterator[Point]) -> Iterator[Point]:
    return (p for p, _ in zip(points, range(_TRIES), strict=False))


def _about_batch(text: str) -> Any:
    """An assumption about B alone as a relation; None for any other."""
    try:
        guard = sympy.sympify(text, locals={"B": sympy.Symbol("B", positive=True, integer=True)})
    except (sympy.SympifyError, SyntaxError, TypeError, AttributeError):
        return None
    alone = isinstance(guard, sympy.core.relational.Relational) and {s.name for s in guard.free_symbols} == {"B"}
    return guard if alone else None
