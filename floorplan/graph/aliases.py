"""Which values of a graph may share memory, and which nodes write into it.

A node can be moved, or read later than it was written, only if nothing in between writes into what
it reads. What is not known to return a new tensor is taken to return a view of its inputs.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from floorplan.graph.edit import called
from floorplan.layers.layer import Layer
from floorplan.torch_doors import AvgPoolNd, BatchNormNd, ConvNd, MaxPoolNd

_FRESH_MODULES = (nn.Linear, ConvNd, BatchNormNd, MaxPoolNd, AvgPoolNd, nn.Upsample)
_FRESH_FUNCTIONS = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, torch.cat, F.pad}
_NAMES = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor setitem"
_WRITERS = {getattr(operator, name) for name in _NAMES.split()}
Roots = dict[fx.Node, frozenset[fx.Node]]


def roots_of(gm: fx.GraphModule) -> Roots:
    """For every node, the nodes whose memory its value may share, itself included."""
    roots: Roots = {}
    for n in gm.graph.nodes:
        shared = () if _fresh(gm, n) else (roots[a] for a in n.all_input_nodes)
        roots[n] = frozenset({n}).union(*shared)
    return roots


def _fresh(gm: fx.GraphModule, n: fx.Node) -> bool:
    if (m := called(gm, n)) is None:
        return n.target in _FRESH_FUNCTIONS
    if isinstance(m, Layer):
        return m.fresh
    activation = type(m).__module__.startswith("torch.nn.modules.activation")
    return isinstance(m, _FRESH_MODULES) or activation and getattr(m, "inplace", None) is False


def written(gm: fx.GraphModule, n: fx.Node, roots: Roots) -> frozenset[fx.Node]:
    """The memory that a node may write into; all its inputs' for a module that is not torch's."""
    if (m := called(gm, n)) is not None:
        inside = isinstance(m, Layer) or type(m).__module__.startswith("torch.nn.")
        if inside and not getattr(m, "inplace", False):
            return frozenset()
        return frozenset().union(*(roots[a] for a in n.all_input_nodes))
    if n.op in ("call_function", "call_method") and writes(n.target, n.args, n.kwargs):
        outs = (*n.args[:1], n.kwargs.get("input"), n.kwargs.get("out"))
        return frozenset().union(*(roots[a] for a in outs if isinstance(a, fx.Node)))
    return frozenset()


def writes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function or method may write into what it is given."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    trailing = name.endswith("_") and not name.endswith("__")
    named = kwargs.get("inplace") or "out" in kwargs
    functional = getattr(target, "__module__", "") == F.__name__
    named = named or functional and any(a is True for a in args[1:])  # perhaps `inplace`
    return target in _WRITERS or trailing or bool(named)


def writer_between(gm: fx.GraphModule, first: fx.Node, last: fx.Node, read: fx.Node, roots: Roots) -> fx.Node | None:
    """A node strictly between two others that may write into what `read` is."""
    between = (n for n in gm.graph.nodes if first < n < last)
    return next((n for n in between if written(gm, n, roots) & roots[read]), None)


def reader_after(gm: fx.GraphModule, at: fx.Node, value: fx.Node, roots: Roots) -> fx.Node | None:
    """A node after `at` that may read the memory of `value`, other than through `at` itself."""
    through = {n for n in roots if at in roots[n]}
    same = {n for n in roots if n not in through and roots[n] & roots[value]}
    return next((n for n in gm.graph.nodes if n > at and same.intersection(n.all_input_nodes)), None)
