"""What a forward computes under torch.no_grad(), as nodes that no gradient reaches.

with torch.no_grad(): t = self.teacher(x)   ->   detach = x.detach(); teacher = teacher(detach); t = teacher.detach()

Values are detached where they enter; parameters are read detached, and a layer that is called there alone is replaced
in the graph by a frozen twin on the same memory: so nothing is kept, and what leaves needs no gradient.
"""

import copy
import operator
import sys
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from floorplan.graph.aliases import writes
from floorplan.graph.decide import Undecided, ValueBranch
from floorplan.graph.leaves import Refusal
from floorplan.torch_doors import is_erased, tree_leaves


def in_function() -> bool:
    """Whether a custom autograd.Function is computing what runs now."""
    if torch.is_grad_enabled():
        return False
    kinds, codes = [torch.autograd.Function], set()
    while kinds:
        codes.add(getattr((kind := kinds.pop()).forward, "__code__", None))
        kinds += kind.__subclasses__()
    return any(f.f_code in codes for f, _ in walk_stack(sys._getframe(1)))


class Quiet:
    """The nodes of one trace that are made under torch.no_grad()."""

    def __init__(self, tracer: Any, root: nn.Module) -> None:
        self.tracer, self.root, self.loud = tracer, root, torch.is_grad_enabled()
        self.nodes: set[fx.Node] = set()
        self.detached: dict[fx.Node, fx.Node] = {}
        self._within = False

    @property
    def now(self) -> bool:
        """Whether gradients are switched off where the trace stands."""
        return self.loud and not torch.is_grad_enabled()

    def across(self, kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of a new node, detached where they enter or leave; Refusal for what cannot be said so."""
        if self._within or kind in ("placeholder", "get_attr") or not (self.now or self.nodes):
            return args, kwargs
        moved = map_arg((args, kwargs), lambda n: self._crossed(n, target))
        if self.now and args and isinstance(args[0], fx.Node) and args[0] not in self.nodes:
            inplace = kind == "call_module" and getattr(self.root.get_submodule(target), "inplace", False)
            state = args[0].op == "get_attr" and not self._value(args[0]).requires_grad
            if not state and (inplace or kind != "call_module" and writes(target, args, kwargs)):
                raise Refusal("writes under torch.no_grad() into a tensor from outside")
            if state:
                return (args[0], *moved[0][1:]), moved[1]
        return moved[0], moved[1]

    def made(self, node: fx.Node) -> fx.Node:
        """A new node, remembered if it is quiet."""
        if self._within or node.op not in ("call_function", "call_method", "call_module"):
            return node
        source = node.args[0] if node.target is operator.getitem else None
        outside = isinstance(source, fx.Node) and source not in self.nodes
        if (self.now and not outside) or (isinstance(source, fx.Node) and source in self.nodes):
            self.nodes.add(node)
        return node

    def frozen(self, gm: fx.GraphModule) -> None:
        """Put frozen twins, on the same memory, in the place of the modules that quiet nodes call.

        Refusal where another node calls such a module too, or one that it is part of.
        """
        calls = [n for n in gm.graph.nodes if n.op == "call_module" and list(gm.get_submodule(n.target).parameters())]
        loud = {f"{n.target}." for n in calls if n not in self.nodes}
        for path in {str(n.target): None for n in calls if n in self.nodes}:
            if any(other.startswith(f"{path}.") or f"{path}.".startswith(other) for other in loud):
                raise Refusal(f"calls {path} under torch.no_grad() and outside of it")
            m = gm.get_submodule(path)
            memo: dict[int, Any] = {id(b): b for b in m.buffers()}
            memo |= {id(p): nn.Parameter(p.data, requires_grad=False) for p in m.parameters()}
            gm.set_submodule(path, copy.deepcopy(m, memo))

    def _value(self, node: fx.Node) -> Any:
        try:
            return self.tracer.evaluator.value(node)
        except (Undecided, ValueBranch) as e:
            raise Refusal("computes under torch.no_grad() with what tracing cannot follow") from e

    def _crossed(self, node: fx.Node, target: Any) -> fx.Node:
        if (node in self.nodes) is self.now or node in self.detached.values():
            return node
        value = self._value(node)
        if not isinstance(value, Tensor):
            if target is not operator.getitem and any(isinstance(v, Tensor) for v in tree_leaves(value)):
                raise Refusal("takes a container of tensors into or out of torch.no_grad()")
            return node
        if not value.is_floating_point():
            return node
        found = self.detached.get(node)
        if found is None or is_erased(found):
            self._within = True
            try:
                found = self.detached[node] = self.tracer.create_node("call_method", "detach", (node,), {})
            finally:
                self._within = False
        return found
