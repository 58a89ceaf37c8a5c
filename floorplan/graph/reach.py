"""Which layers a gradient can reach."""

from typing import Any

from torch import fx

from floorplan.graph.aliases import writes

# What has no derivative: numbers, positions and truth values of a tensor, and a tensor cut off.
_STOPS = frozenset(
    """detach detach_ argmax argmin argsort nonzero item tolist numpy size dim numel long int short bool eq ne lt le
    gt ge isnan isinf isfinite logical_not logical_and logical_or sign round floor ceil trunc bincount histc
    one_hot searchsorted bucketize nms""".split()
)
_ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim", "data"))
CUT_OFF = "its output is only used detached or under torch.no_grad(), so no gradient would ever reach an adapter"


def _stops(n: fx.Node) -> bool:
    target: Any = n.target
    if target is getattr:
        return n.args[1] in _ATTRIBUTES
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return n.op in ("call_function", "call_method") and name in _STOPS


def reached(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that a gradient of the outputs can come to, as far as the graph says; what is unsure is among them."""
    found: set[fx.Node] = set()
    for n in reversed(gm.graph.nodes):
        written = n.op in ("call_function", "call_method") and writes(n.target, n.args, n.kwargs)
        if n.op == "output" or written or any(u in found and not _stops(u) for u in n.users):
            found.add(n)
    return found


def cut_off(gm: fx.GraphModule) -> set[str]:
    """Paths of modules that are called, but nowhere so that a gradient reaches them."""
    calls, alive = [n for n in gm.graph.nodes if n.op == "call_module"], reached(gm)
    return {str(n.target) for n in calls} - {str(n.target) for n in calls if n in alive}
