"""One spelling an op: functions, methods and stateless modules become one kind of node each.

    F.relu(x)  torch.relu(x)  x.relu()  ->  ReLU(x)          F.conv2d(x, self.w)  ->  Conv2d(x)
    x.add_(y)  x += y                   ->  iadd(x, y)       nn.ZeroPad2d(1)      ->  F.pad(x, …)
    F.dropout(x, p, training=flag)      ->  Dropout(x)       nn.Identity          ->  removed

A node keeps its name. In-place stays in place, since other readers of the tensor see the change.
"""

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from floorplan.graph import spellings
from floorplan.graph.adopt import adopt
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import called, calls_of, free_path, module_calls
from floorplan.graph.leaves import is_plain_leaf, leaf_reason
from floorplan.graph.spellings import Spelling, parameters
from floorplan.layers.plain import TrainingFlag

_DROPOUT_MODULES = tuple(dict.fromkeys(cast(Any, s.make) for s in spellings.DROPOUTS.values()))
_ADD = Spelling(parameters("input other alpha=1"), nn.Identity)
_TAKES: dict[Any, Spelling] = {
    operator.add: _ADD,
    operator.iadd: _ADD,
    torch.flatten: Spelling(parameters("input start_dim=0 end_dim=-1"), nn.Identity),
    torch.cat: Spelling(parameters("tensors dim=0"), nn.Identity),
    F.pad: Spelling(spellings.PAD, nn.Identity),
}
_SYNONYMS: dict[Any, Any] = {
    torch.add: operator.add,
    "add": operator.add,
    "add_": operator.iadd,
    "flatten": torch.flatten,
    torch.concat: torch.cat,
    torch.concatenate: torch.cat,
    **{f: f for f in (torch.flatten, torch.cat, F.pad)},
}


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Rewrite every node that has another spelling, in order."""
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            found = _module(gm, node)
        elif node.op in ("call_function", "call_method"):
            found = _call(gm, node)
        else:
            continue
        if found is not None:
            yield Site(node.name, found)
    for node, _ in module_calls(gm, TrainingFlag):
        if not node.users:
            gm.graph.erase_node(node)


def _call(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Rewrite a function or method; the reason if it cannot be, None if it is nothing of ours."""
    t: Any = node.target
    functions = {**spellings.DROPOUTS, **spellings.WEIGHTED, **spellings.FUNCTIONS}
    spelling = (spellings.METHODS if isinstance(t, str) else functions).get(t)
    try:
        if t in _SYNONYMS:
            return _rename(node, _SYNONYMS[t])
        if getattr(t, "__name__", t) in spellings.NO_MODULE:
            return f"{getattr(t, '__name__', t)} works in place, and no module does"
        if spelling is None:
            return None
        bound = spelling.bind(node.args, dict(node.kwargs))
    except TypeError as e:
        return f"{getattr(t, '__name__', t)} has {e}, which is not handled"
    if not isinstance(bound.get("input"), fx.Node):
        return "its input is not computed in the graph"
    if t in spellings.DROPOUTS:
        return _dropout(gm, node, spelling.make, bound)
    if t in spellings.WEIGHTED:
        return adopt(gm, node, spelling.make, bound, _flag_of(gm, bound.get("training", False)))
    return _stateless(gm, node, spelling, bound)


def _flag_of(gm: fx.GraphModule, flag: Any) -> Any:
    """True, False, the TrainingFlag module, or None for a computed flag."""
    if isinstance(flag, fx.Node):
        return m if isinstance(m := called(gm, flag), TrainingFlag) else None
    return bool(flag)


def _become(gm: fx.GraphModule, node: fx.Node, m: nn.Module, x: Any, owner: str = "") -> None:
    """Turn a node into a call of a new module named after it."""
    path = free_path(gm, f"{owner}.{node.name}" if owner else node.name)
    gm.add_submodule(path, m)
    node.op, node.target, node.args, node.kwargs = "call_module", path, (x,), {}


def _stateless(gm: fx.GraphModule, node: fx.Node, s: Spelling, bound: dict[str, Any]) -> str:
    x = bound.pop("input")
    for name, value in bound.items():
        computed: list[fx.Node] = []
        fx.node.map_arg(value, computed.append)
        if computed:
            how = "a tensor, not a number" if computed[0].op == "get_attr" else "computed while running"
            return f"{name} is {how} ({computed[0].name})"
    if bound.get("return_indices"):
        return "it returns indices too"
    if isinstance(bound.get("min", 0), bool) or isinstance(bound.get("max", 0), bool):
        return "its bounds are not numbers"
    options = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in bound.items()}  # not fx's own lists
    _become(gm, node, s.make(**options, **dict(s.fixed)).train(gm.training), x)
    return ""


def _dropout(gm: fx.GraphModule, node: fx.Node, make: Callable[..., nn.Module], bound: dict[str, Any]) -> str:
    flag, x = _flag_of(gm, bound["training"]), bound["input"]
    if flag is None:
        return f"training is computed while running ({bound['training'].name})"
    if flag is True:
        return "it drops in eval mode too (training=True)"
    if isinstance(bound["p"], fx.Node):
        return f"p is computed while running ({bound['p'].name})"
    if flag is False or bound["p"] == 0:
        node.replace_all_uses_with(x)
        gm.graph.erase_node(node)
        return ""
    owner = str(bound["training"].target).rpartition(".")[0]
    m = make(p=bound["p"], inplace=bound.get("inplace", False)).train(flag.training)
    _become(gm, node, m, x, owner)
    return ""


def _rename(node: fx.Node, to: Any) -> str | None:
    """Spell an add, a flatten, a concat or a pad in the one way."""
    named = {"dim" if to is torch.cat and k == "axis" else k: v for k, v in node.kwargs.items()}
    bound = _TAKES[to].bind(node.args, named)
    if to in (operator.add, operator.iadd):
        if not all(isinstance(bound[k], fx.Node) for k in ("input", "other")):
            return None
        if bound.pop("alpha") != 1:
            return "it scales what it adds (alpha)"
    kwargs = {k: bound.pop(k) for k in list(bound)[1:]} if to is F.pad else {}
    args = tuple(bound.values())
    if (node.op, node.target, node.args, dict(node.kwargs)) == ("call_function", to, args, kwargs):
        return None
    node.op, node.target, node.args, node.kwargs = "call_function", to, args, kwargs
    return ""


def _module(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Rewrite a module call; as in `_call`."""
    m = gm.get_submodule(str(node.target))
    if not is_plain_leaf(m) or isinstance(m, TrainingFlag):
        return None
    known = isinstance(m, (nn.Identity, *_DROPOUT_MODULES, *spellings.PAD_MODULES))
    if why := leaf_reason(m):
        return why if known else None
    dead = isinstance(m, _DROPOUT_MODULES) and cast(Any, m).p == 0
    x = node.args[0] if node.args else node.kwargs.get("input")
    if (dead or type(m) is nn.Identity) and isinstance(x, fx.Node):
        node.replace_all_uses_with(x)
        gm.graph.erase_node(node)
        return ""
    if type(m) in spellings.PAD_MODULES and isinstance(x, fx.Node):
        pad, value = cast(Any, m).padding, getattr(m, "value", None)
        options = {"pad": tuple(pad), "mode": spellings.PAD_MODULES[type(m)], "value": value}
        node.op, node.target, node.args, node.kwargs = "call_function", F.pad, (x,), options
        return ""
    return _own_instance(gm, node, m)


def _own_instance(gm: fx.GraphModule, node: fx.Node, m: nn.Module) -> str | None:
    """Give a later call of a stateless module an instance of its own."""
    stateful = next(m.parameters(), None) is not None or next(m.buffers(), None) is not None
    if stateful or calls_of(gm, str(node.target))[0] is node:
        return None
    path = free_path(gm, str(node.target))
    gm.add_submodule(path, copy.deepcopy(m))
    node.target = path
    return ""


PASS = Pass("canonicalize", run)
