"""From conv and BatchNorm modules to sites: what can be folded, adapted, and why not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.nn.utils import parametrize

from floorplan.errors import FloorplanError
from floorplan.layers.geometry import CONVS, TRANSPOSED, Geometry, geometry_of
from floorplan.layers.layer import Adapter

MODES = {"constant": "zeros"} | {m: m for m in ("reflect", "replicate", "circular")}
PAD = ("input", "pad", "mode", "value")
CONV_TYPES = CONVS + TRANSPOSED


def module_calls(gm: fx.GraphModule, *kinds: type[nn.Module]) -> Iterator[tuple[fx.Node, nn.Module]]:
    """Every call_module node of one of `kinds`, in order; nodes may be erased meanwhile."""
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            m = gm.get_submodule(str(node.target))
            if isinstance(m, kinds):
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


def train_head(gm: fx.GraphModule) -> None:
    """Let the last Linear layer train."""
    heads = [m for _, m in module_calls(gm, nn.Linear)]
    if not heads:
        raise FloorplanError("--train-head: the model has no Linear layer; leave the option out")
    heads[-1].requires_grad_(True)
