"""A graph on example inputs, as every program of it is written from: found once, whatever the schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from floorplan.step.graph import crossings, learners, ordered, values_of
from floorplan.step.rules import Rule, rule_of


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
