"""A graph on example inputs, as every program of it is written from: found once, whatever the schedule."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from floorplan.errors import FloorplanError
from floorplan.layers.layer import model_state
from floorplan.ledger.fakes import concrete_fakes
from floorplan.step.rules import Rule, rule_of
from floorplan.torch_doors import tensors_in, wants_values


def ordered(gm: fx.GraphModule) -> list[fx.Node]:
    """The graph's nodes with every getitem right behind the tuple that it reads."""
    taken: dict[fx.Node, list[fx.Node]] = {}
    for n in gm.graph.nodes:
        if n.op == "call_function" and n.target is operator.getitem and isinstance(n.args[0], fx.Node):
            if len(n.all_input_nodes) == 1:
                taken.setdefault(n.args[0], []).append(n)
    out: list[fx.Node] = []

    def put(n: fx.Node) -> None:
        out.append(n)
        for item in taken.get(n, ()):
            put(item)

    items = {n for group in taken.values() for n in group}
    for n in gm.graph.nodes:
        if n not in items:
            put(n)
    return out


def values_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """node -> its value, on fakes of these inputs."""
    fakes = concrete_fakes(gm, inputs)
    walk = fx.Interpreter(fakes.gm, garbage_collect_values=False)
    walk.extra_traceback = False
    with fakes.mode, torch.no_grad():
        try:
            walk.run(*fakes.inputs)
        except Exception as e:
            if not wants_values(e):
                raise
            names = {copy: n.name for n, copy in zip(gm.graph.nodes, fakes.gm.graph.nodes, strict=True)}
            at = next((names[n] for n in fakes.gm.graph.nodes if n not in walk.env), "the forward")
            raise FloorplanError(f"{at}: reads tensor values; a step that is planned ahead cannot know them") from e
    copies = zip(gm.graph.nodes, fakes.gm.graph.nodes, strict=True)  # whose names fx may have changed
    return {n.name: walk.env[copy] for n, copy in copies}


def learners(gm: fx.GraphModule, values: dict[str, Any]) -> set[str]:
    """Nodes downstream of something trainable, whose values are real numbers."""
    out: set[str] = set()
    for n in gm.graph.nodes:
        own = n.op == "call_module" and any(t.requires_grad for t in model_state(gm.get_submodule(str(n.target))))
        if n.op == "get_attr":
            parent, _, name = str(n.target).rpartition(".")
            own = bool(getattr(getattr(gm.get_submodule(parent), name, None), "requires_grad", False))
        if own or any(a.name in out for a in n.all_input_nodes):
            if any(t.is_floating_point() or t.is_complex() for t in tensors_in(values.get(n.name))):
                out.add(n.name)
    return out


def crossings(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """(node, value): after that node one value alone is still to be read, and no input is."""
    at = {n: k for k, n in enumerate(nodes)}
    last = {n: max((at[u] for u in n.users), default=-1) for n in nodes}
    live: set[fx.Node] = set()
    out = []
    for k, n in enumerate(nodes):
        if n.op != "get_attr":
            live.add(n)
        live = {v for v in live if last[v] > k}
        if len(live) == 1 and n.op not in ("placeholder", "output", "get_attr"):
            out.append((n, next(iter(live))))
    return out


@dataclass(frozen=True)
class Studied:
    """What programs need to know of a graph; none of it depends on the batch."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]  # in the order of the step
    values: dict[str, Any]  # node -> its value on fakes of the inputs
    learns: set[str]  # nodes whose value needs a gradient
    rules: dict[str, Rule]  # node -> its straight-line rule; what has none runs under autograd
    crossings: dict[str, str]  # node -> the one value that crosses behind it

    @property
    def inside(self) -> list[fx.Node]:
        """The nodes that compute."""
        return [n for n in self.nodes if n.op not in ("placeholder", "output", "get_attr")]

    @property
    def output(self) -> fx.Node:
        """The node that ends the graph."""
        return next(n for n in self.nodes if n.op == "output")


def studied(gm: fx.GraphModule, inputs: Sequence[Any]) -> Studied:
    """Look at a graph, by one run on fakes of these inputs."""
    nodes, values = ordered(gm), values_of(gm, inputs)
    found = ((n.name, rule_of(n, gm, values)) for n in nodes)
    rules = {name: rule for name, rule in found if rule is not None}
    crossing = {n.name: v.name for n, v in crossings(nodes)}
    return Studied(gm, tuple(inputs), tuple(nodes), values, learners(gm, values), rules, crossing)
