"""What passes do to graphs: calls found, modules put in their place and swapped, paddings taken over."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.nn.utils import parametrize

from floorplan.graph.driver import Site
from floorplan.layers.geometry import CONVS, TRANSPOSED, Geometry, geometry_of
from floorplan.layers.layer import Adapter

MODES = {"constant": "zeros"} | {m: m for m in ("reflect", "replicate", "circular")}
PAD = ("input", "pad", "mode", "value")
CONV_TYPES = CONVS + TRANSPOSED


def called(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a node calls; None for a node that calls none."""
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


def module_calls(gm: fx.GraphModule, *kinds: type[nn.Module]) -> Iterator[tuple[fx.Node, nn.Module]]:
    """Every call_module node of one of `kinds`, in order; nodes may be erased meanwhile."""
    for node in list(gm.graph.nodes):
        if isinstance(m := called(gm, node), kinds):
            yield node, m


def calls_of(gm: fx.GraphModule, target: str) -> list[fx.Node]:
    """All nodes that call one module path."""
    return [n for n in gm.graph.nodes if n.op == "call_module" and n.target == target]


def is_depthwise(m: nn.Module) -> bool:
    """One input channel a group: no rank-r projection can be narrower."""
    known = isinstance(m, (Adapter, *CONV_TYPES)) and m.in_channels > 1
    return known and geometry_of(m).groups == m.in_channels


def tied_convs(gm: fx.GraphModule) -> list[str]:
    """A word about convs that are modules of their own on one weight: their adapters are not tied."""
    paths: dict[int, dict[str, None]] = {}
    for node, m in module_calls(gm, *CONV_TYPES):
        if not parametrize.is_parametrized(m):  # whose weight is made, and its state renewed, when read
            paths.setdefault(id(m.weight), {})[str(node.target)] = None
    word = "share one weight; each gets an adapter of its own"
    return [f"{', '.join(same)} {word}" for same in paths.values() if len(same) > 1]


def set_module(gm: fx.GraphModule, path: str, m: nn.Module) -> None:
    """Put m at a dotted path that exists already, or whose parent does."""
    parent, _, name = path.rpartition(".")
    setattr(gm.get_submodule(parent), name, m)


def free_path(gm: fx.GraphModule, path: str) -> str:
    """`path`, or path_1, path_2, … if it is taken."""
    parent, _, name = path.rpartition(".")
    owner, k, new = gm.get_submodule(parent), 0, name
    while hasattr(owner, new):
        k += 1
        new = f"{name}_{k}"
    return f"{parent}.{new}" if parent else new


def padded(geo: Geometry, options: dict[str, Any]) -> Geometry | str:
    pads, mode, value = options.get("pad"), options.get("mode", "constant"), options.get("value")
    if not isinstance(pads, tuple | list) or not all(isinstance(p, int) for p in pads):
        return "padding is computed at run time"
    if geo.transposed:
        return "padding before a transposed conv"
    if any(p < 0 for p in pads):
        return "negative padding crops"
    if mode == "constant" and value not in (None, 0, 0.0):
        return f"pads with {value}, which does not commute with the projection"
    nd = len(geo.kernel)
    if len(pads) > 2 * nd and any(pads[2 * nd :]):
        return "pads batch or channels"
    pairs = [(pads[2 * i], pads[2 * i + 1]) for i in range(min(nd, len(pads) // 2))]
    pairs = [*reversed(pairs + [(0, 0)] * (nd - len(pairs)))]
    own = any(p != (0, 0) for p in geo.padding)
    if own and not (MODES[mode] == geo.mode == "zeros"):
        return f"{mode} padding before a conv that pads by itself"
    total = tuple((a + c, b + d) for (a, b), (c, d) in zip(pairs, geo.padding, strict=True))
    return replace(geo, padding=total, mode=MODES[mode])


def swap(gm: fx.GraphModule, twin: Callable[[nn.Module], nn.Module | str | None]) -> Iterator[Site]:
    """Put twin(m) in the place of every module m; a Site a call. A text says why m stays, None says nothing of it."""
    calls_by_target: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls_by_target.setdefault(str(node.target), []).append(node)
    for target, calls in calls_by_target.items():
        module = gm.get_submodule(target)
        if (new := twin(module)) is None:
            continue
        why = new if isinstance(new, str) else _overwrites(module, calls)
        if isinstance(new, nn.Module) and not why:
            gm.set_submodule(target, new)
        for node in calls:
            yield Site(node.name, why)


def _overwrites(module: nn.Module, calls: list[fx.Node]) -> str:
    """Why an in-place module must stay in place: somebody reads its input after it; else ""."""
    if not getattr(module, "inplace", False):
        return ""
    for node in calls:
        for user in (u for source in node.all_input_nodes for u in source.users):
            if user is not node and node < user:
                return f"{user.name} reads what {node.name} writes in place; set inplace=False"
    return ""
