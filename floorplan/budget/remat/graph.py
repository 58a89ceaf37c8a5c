"""The graph that keeps only some of its values: promises of remat_region put into a copy.

    z = conv(x)                x_kept = Keep(x); z_promised = Promise(conv, x_kept); z = conv(x)
    a = silu(z)      ->        a = Forgetful(silu, z; z_promised)

Every original node keeps its name and its place, every module its path.
"""

from collections.abc import Set
from typing import Any

from torch import fx, nn

from floorplan.budget.remat.study import Value, sources
from floorplan.graph.copies import clone_structure
from floorplan.graph.edit import free_path
from floorplan.layers.promises import Forgetful, Keep, Promise
from floorplan.layers.targets import name_of


def apply(
    gm: fx.GraphModule, values: dict[str, Value], again: Set[str], apart: bool = False
) -> tuple[fx.GraphModule, int]:
    """A copy on the same parameters that computes the nodes `again` in the backward, and its extra multiply-adds.

    apart: each node that reads such a value has it computed for itself; nothing waits for the next reader.
    """
    twin = clone_structure(gm)
    twin.meta = dict(gm.meta)
    writer = _Writer(twin, gm.graph, values, again, apart)
    for n in list(twin.graph.nodes):
        writer.visit(n)
    twin.graph.lint()
    twin.recompile()
    return twin, writer.macs


class _Writer:
    """Adds Keep and Promise nodes and turns into Forgetful ones those that save what is not kept."""

    def __init__(
        self, gm: fx.GraphModule, before: fx.Graph, values: dict[str, Value], again: Set[str], apart: bool
    ) -> None:
        self.gm, self.graph, self.values, self.again, self.apart = gm, gm.graph, values, again, apart
        self.macs = 0
        read = {s for n in gm.graph.nodes if n.name in again for s in sources(n, values)}
        self.kept = read - again
        self.made: dict[str, fx.Node] = {}  # Keep or Promise node of a value
        self.nodes = {n.name: n for n in gm.graph.nodes}
        self.calls = {n.name: n for n in before.nodes}  # what a node called before it is changed
        self.last_input = [n for n in gm.graph.nodes if n.op == "placeholder"][-1:]
        self.home = free_path(gm, "remat")
        gm.add_submodule(self.home, nn.Module().train(gm.training))
        self.modules: dict[tuple[str, ...], str] = {}

    def visit(self, n: fx.Node) -> None:
        """Write what belongs to one node of the original graph."""
        if n.name in self.again and not self.apart:
            with self.graph.inserting_before(n):
                self._promise(n.name, self.made)
        if n.name in self.kept:
            with self.graph.inserting_after(self.last_input[0] if n.op == "placeholder" else n):
                path = self._module(Keep)
                self.made[n.name] = self.graph.create_node("call_module", path, (n,), {}, f"{n.name}_kept")
        if forgets := [o for o in self.values[n.name].saves if o in self.again]:
            self._forget(n, forgets)

    def _promise(self, name: str, made: dict[str, fx.Node]) -> fx.Node:
        """The promise of a node's value, after those that it is computed from; or what is kept of it."""
        if name not in made and name in self.again:
            n = self.calls[name]
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda u: self._promise(u.name, made))
            args, key = self._called(n, args)
            path = self._module(Promise, *key)
            made[name] = self.graph.create_node("call_module", path, (args, kwargs), {}, f"{name}_promised")
            self.macs += self.values[name].macs
        return made.get(name) or self.made.get(name) or self.nodes[name]

    def _forget(self, n: fx.Node, forgets: list[str]) -> None:
        made = {} if self.apart else self.made
        others = [o for o in forgets if o != n.name]
        with self.graph.inserting_before(n):
            promises = {o: self._promise(o, made) for o in forgets}
            args, key = self._called(n, n.args)
        values, promised = tuple(self.nodes[o] for o in others), tuple(promises[o] for o in others)
        n.args, n.kwargs = (args, n.kwargs, values, promised, promises.get(n.name)), {}
        n.op, n.target = "call_module", self._module(Forgetful, *key)

    def _called(self, n: Any, args: Any) -> tuple[Any, tuple[str, str]]:
        """Arguments and kind of a call; a module is handed over as the first argument."""
        if n.op == "call_module":
            layer = self.graph.create_node("get_attr", str(n.target), (), {}, f"{n.name}_layer")
            return (layer, *args), ("module", "")
        if n.op == "call_method":
            return args, ("method", str(n.target))
        return args, ("function", name_of(n.target, f"graph node {n.name}"))

    def _module(self, kind: type[nn.Module], *options: str) -> str:
        key = (kind.__name__, *options)
        if key not in self.modules:
            base = "_".join(x.rpartition(".")[2] for x in key if x).lower()
            path = self.modules[key] = free_path(self.gm, f"{self.home}.{base}")
            self.gm.add_submodule(path, kind(*options).train(self.gm.training))
        return self.modules[key]
