"""From an adapted graph to a straight-line training step: stages, regions, and the source they become.

    stage k     forward_k(x) -> y, kept          backward_k(g, kept) -> gx
    head        finish(x, target) -> loss, gx    the last nodes and the loss, under autograd

A stage is cut where one value alone crosses. What is upstream of everything trainable keeps nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from floorplan.errors import FloorplanError
from floorplan.graph.edit import module_calls
from floorplan.layers.fused import FusedConv
from floorplan.step.ir import Function, Instr, Names
from floorplan.step.rules import Context
from floorplan.step.schedule import WHOLE, Schedule
from floorplan.step.stream_rules import Triple, stream_backward, stream_forward, triple, wide
from floorplan.step.studied import Studied
from floorplan.torch_doors import tensors_in


@dataclass(frozen=True)
class RegionSource:
    """Nodes that run under autograd: a function of `arguments`, and which of these need a gradient."""

    name: str
    nodes: tuple[fx.Node, ...]
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    grads: tuple[bool, ...]


@dataclass
class StageCode:
    """One stage's two functions; `result` crosses to the next."""

    forward: Function
    backward: Function
    learns: bool  # whether its argument needs a gradient
    keeps: tuple[str, ...]


@dataclass
class Program:
    """Stages in order, the head that ends them, and the regions that any of these call."""

    gm: fx.GraphModule
    stages: list[StageCode]
    head: RegionSource
    regions: list[RegionSource]
    names: Names
    refs: dict[str, str]  # module path -> name in the source
    inputs: tuple[str, ...]
    example: tuple[Any, ...]
    values: dict[str, Any] = field(repr=False, default_factory=dict)


class Builder:
    """Builds a program of a graph by a schedule."""

    def __init__(self, s: Studied, schedule: Schedule = WHOLE) -> None:
        self.studied, self.gm, self.nodes = s, s.gm, s.nodes
        self.values, self.learns, self.rules = s.values, s.learns, s.rules
        self.reuse, self.stream = frozenset(schedule.reuse), schedule.stream
        self.regions: list[RegionSource] = []
        self.names, self.refs = Names(n.name for n in s.nodes), dict[str, str]()
        self.comments = {n.name: _comment(s.gm, n, self.values.get(n.name)) for n in self.nodes}
        self.cuts = self._checked([n for n, _ in schedule.stages])
        batch = next((v.shape[0] for v in tensors_in(s.inputs) if v.dim()), 1)
        if self.stream and not wide(s):
            raise FloorplanError("schedule: stream: the model has no inverted residual whose maps could be streamed")
        chosen, known = schedule.branches, {n.name for n in self.nodes}
        if strange := [n for n in (*(chosen or ()), *schedule.reuse) if n not in known]:
            raise FloorplanError(f"schedule: {strange[0]}: the model has no such node")
        sizes = self._sizes(schedule, batch)
        self.branches = frozenset(branches(s.gm, self.values, sizes) if chosen is None else chosen)

    def _sizes(self, s: Schedule, batch: int) -> dict[str, int]:
        """The samples at a time at every node."""
        most, at, out = s.micro_batch or batch, 0, {}
        sizes, ends = [*(m for _, m in s.stages), s.last], [n for n, _ in s.stages]
        for n in self.nodes:
            out[n.name] = min(sizes[at] or most, most)
            at += at < len(ends) and n.name == ends[at]
        return out

    def _checked(self, cuts: Sequence[str]) -> list[tuple[str, str]]:
        possible = self.studied.crossings
        for c in cuts:
            if c not in {n.name for n in self.nodes}:
                raise FloorplanError(f"schedule: {c}: the model has no such node; {_near(possible)}")
            if c not in possible:
                raise FloorplanError(f"schedule: {c}: more than one value crosses behind it; {_near(possible)}")
        return [(c, possible[c]) for c in cuts]

    def build(self) -> Program:
        """The program."""
        inside = self.studied.inside
        ruled = [k for k, n in enumerate(inside) if n.name in self.rules]
        split = ruled[-1] + 1 if ruled else 0
        body, tail = inside[:split], inside[split:]
        inputs = tuple(n.name for n in self.nodes if n.op == "placeholder")
        parts, start = [], 0
        for c, value in self.cuts:
            end = next((k + 1 for k, n in enumerate(body) if n.name == c), None)
            if end is None or end <= start:
                raise FloorplanError(f"schedule: {c}: is no cut in order, inside the straight-line part")
            parts.append((body[start:end], (value,)))
            start = end
        head = self._region(tail, extra=self.studied.output, name="head")
        last = tuple(a.name for a in head.arguments)
        stages: list[StageCode] = []
        arguments, owned = inputs, False
        for nodes, results in [*parts, (body[start:], last)]:
            stages.append(self._stage(len(stages), nodes, arguments, results, owned))
            arguments, owned = results, True
        made = self.gm, stages, head, self.regions, self.names, self.refs
        return Program(*made, inputs, self.studied.inputs, self.values)

    def _stage(
        self, k: int, nodes: list[fx.Node], arguments: tuple[str, ...], results: tuple[str, ...], owned: bool
    ) -> StageCode:
        named = (self.names, self.refs, self.stream)
        c = Context(self.gm, self.values, self.learns, self.rules, self.branches, self.reuse, *named)
        raw = () if owned else tuple(a for a in arguments if self._lies(a))
        for a in raw:
            c.forward.append(self._laid(a))
        units = self._units(c, nodes)
        for unit in units:
            if isinstance(unit, RegionSource):
                self._call(c, unit)
            elif isinstance(unit, tuple):
                stream_forward(c, unit)
            else:
                self.rules[unit.name].forward(c, unit)
        c.grads = {r: self.names.fresh(f"g_{r}") for r in results if r in self.learns}
        given = tuple(c.grads.values())
        for unit in reversed(units):
            if isinstance(unit, RegionSource):
                self._return(c, unit)
            elif isinstance(unit, tuple):
                if (g := c.grads.get(unit[2].name)) is not None:
                    stream_backward(c, unit, g)
            elif (g := c.grads.get(unit.name)) is not None:
                self.rules[unit.name].backward(c, unit, g)
        wanted = tuple(c.grads[a] for a in arguments if a in self.learns and a in c.grads)
        read = {v for i in c.backward for v in i.reads}
        keeps = tuple(v for v in dict.fromkeys(v for i in c.forward for v in i.out) if v in read)
        taken = tuple(self.names.of("r" if a in raw else "", a) for a in arguments)
        made = tuple(self.names.of("", r) for r in results)
        forward = Function(f"forward_{k}", taken, c.forward, (*made, *keeps), owned, self.comments)
        apart = len(given) < 2  # gradients that come together may share memory
        backward = Function(f"backward_{k}", (*given, *keeps), c.backward, wanted, apart, self.comments)
        return StageCode(forward, backward, bool(wanted), keeps)

    def _lies(self, name: str) -> bool:
        """Whether a value is a map, which lies in the step's layout."""
        v = self.values.get(name)
        return isinstance(v, Tensor) and v.is_floating_point() and v.dim() in (4, 5)

    def _laid(self, v: str) -> Instr:
        raw = (self.names.of("r", v),)
        return Instr(v, (self.names.of("", v),), "as_map({0}, LAYOUT)", raw, shares=raw)

    def _units(self, c: Context, nodes: list[fx.Node]) -> list[fx.Node | RegionSource | Triple]:
        """What is written as one: a node with a rule, an inverted residual, a region."""
        out: list[fx.Node | RegionSource | Triple] = []
        run: list[fx.Node] = []
        inside = set(nodes)
        taken = {t[2]: t for n in nodes if (t := triple(c, n)) and inside.issuperset(t)}
        skipped = {n for t in taken.values() for n in t[:2]}
        for n in nodes:
            if n in skipped:
                continue
            if n.name not in self.rules:
                run.append(n)
                continue
            out += [self._region(run)] if run else []
            run = []
            out.append(taken.get(n, n))
        return out + ([self._region(run)] if run else [])

    def _region(self, nodes: list[fx.Node], extra: fx.Node | None = None, name: str = "") -> RegionSource:
        inside = set(nodes)
        readers = [*nodes, extra] if extra is not None else nodes
        read = dict.fromkeys(a for n in readers for a in n.all_input_nodes)
        arguments = tuple(a for a in read if a not in inside and a.op != "get_attr")
        results = tuple(n for n in nodes if any(u not in inside for u in n.users)) if extra is None else ()
        for v in (*arguments, *results):
            if v.name in self.learns and not isinstance(self.values[v.name], Tensor):
                what = f"a {type(self.values[v.name]).__name__} of tensors"
                raise FloorplanError(f"{v.name}: {what} crosses a stage; take it apart where it is made")
        grads = tuple(a.name in self.learns for a in arguments)
        called = name or self.names.fresh(f"region_{len(self.regions)}")
        found = RegionSource(called, tuple(readers), arguments, results, grads)
        self.regions += [] if name else [found]
        return found

    def _call(self, c: Context, r: RegionSource) -> None:
        reads = tuple(c.of(a) for a in r.arguments)
        code = ", ".join(f"{{{k}}}" for k in range(len(reads)))
        laid = [n.name for n in r.results if self._lies(n.name)]
        out = tuple(c.of(n, "r" if n.name in laid else "") for n in r.results)
        if any(n.name in self.learns for n in r.results):
            out += (self.names.of("t", r.name),)
            c.forward.append(Instr(r.name, out, f"{r.name}.forward({code})", reads, shares=reads, fresh=False))
        elif out:
            suffix = "[0]" if len(out) == 1 else ""
            c.forward.append(Instr(r.name, out, f"{r.name}.plain({code}){suffix}", reads, shares=reads))
        c.forward += [self._laid(v) for v in laid]

    def _return(self, c: Context, r: RegionSource) -> None:
        names = [c.grads.get(n.name) for n in r.results]
        if not any(names):
            return
        reads = (self.names.of("t", r.name), *(n for n in names if n))
        at = iter(range(1, len(reads)))
        code = ", ".join(f"{{{next(at)}}}" if n else "None" for n in names)
        wanted = [a for a, g in zip(r.arguments, r.grads, strict=True) if g]
        fresh = [c.fresh(a) for a in wanted]
        call = f"{r.name}.backward({{0}}, {code})" + ("[0]" if len(fresh) == 1 else "")
        c.backward.append(Instr(r.name, tuple(fresh), call, reads, shares=reads[1:]))
        for a, g in zip(wanted, fresh, strict=True):
            c.arrive(a, g, r.nodes[0])


def _near(possible: Iterable[str]) -> str:
    return f"cut at one of {', '.join(list(possible)[:8])}, …"


def _comment(gm: fx.GraphModule, n: fx.Node, value: Any) -> str:
    shape = f"  -> {list(value.shape)}" if isinstance(value, Tensor) else ""
    what = f" {gm.get_submodule(str(n.target))}" if n.op == "call_module" else ""
    return " ".join(f"{n.name}{what}".split())[:100] + shape


def branches(gm: fx.GraphModule, values: Mapping[str, Any], samples: Mapping[str, int]) -> tuple[str, ...]:
    """Sites whose weight outweighs their maps at the samples a time that they run in: two branches are faster there.

    merged   one temporary like W, r*|W| multiply-adds           twice a part
    branch   q -> O at full width, added in place: nothing for 1x1 convs, an eighth of the map for others
    """
    out = []
    sites: Iterator[tuple[fx.Node, Any]] = module_calls(gm, FusedConv)
    for n, m in sites:
        x, z = (values[v.name][0].numel() for v in (n.all_input_nodes[0], n))
        if m.rank and m.weight.numel() > samples[n.name] * (x + z):
            out.append(n.name)
    return tuple(out)
