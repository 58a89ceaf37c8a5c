"""Run passes over a graph, verifying after each one.

A pass rewrites a GraphModule in place and yields one Site for every place it looked at: rewritten,
or refused with a reason. The driver, not the pass, decides whether the result is still the same
model.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from floorplan.errors import FloorplanError, PassError


@dataclass(frozen=True)
class Site:
    """One place a pass looked at."""

    node: str
    refused: str = ""  # why it was left alone; "" = rewritten
    note: str = ""  # what the reader should know about a rewritten place


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a GraphModule."""

    name: str  # command-line spelling
    run: Callable[[fx.GraphModule], Iterator[Site]]  # rewrites in place
    tolerance: float = 0.0  # relative output error it may cause in float64


def _drop_leftovers(gm: fx.GraphModule) -> None:
    """Remove unused parameter reads and module objects; in-place ops with no user must stay."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    try:
        return deepcopy(gm)
    except RuntimeError as e:  # torch copies leaves only
        what = "the model holds a computed tensor (an old-style weight_norm or spectral_norm)"
        todo = "remove it first, with torch.nn.utils.remove_weight_norm or remove_spectral_norm"
        raise FloorplanError(f"{what}; {todo}") from e


def _twin(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy on the same memory: a pass replaces tensors, it never writes into one."""
    memo: dict[int, Any] = {id(b): b for b in gm.buffers()}
    memo |= {id(p): nn.Parameter(p.data, p.requires_grad) for p in gm.parameters()}
    return deepcopy(gm, memo)


Check = Callable[[Pass, fx.GraphModule, fx.GraphModule], None]


def rewrite(
    gm: fx.GraphModule, passes: Sequence[Pass], check: Check, copied: bool = True
) -> tuple[fx.GraphModule, dict[str, list[Site]]]:
    """Run `passes` in order on a copy of `gm`; `check(pass, before, after)` raises on a fault.

    copied: the result shares no memory with `gm`, which is never written into either way.
    """
    log: dict[str, list[Site]] = {}
    gm = checked = _copy(gm) if passes and copied else gm
    for p in passes:
        gm = _twin(gm)
        try:
            sites = list(p.run(gm))
            _drop_leftovers(gm)
            gm.graph.lint()
            gm.recompile()
            if any(not s.refused for s in sites):
                check(p, checked, gm)
                checked = gm
        except Exception as e:
            if isinstance(e, FloorplanError) and not isinstance(e, PassError):
                raise  # an option that does not fit is the user's, not a fault of the pass
            done = ", ".join(log) or "none"
            raise PassError(f"{p.name}: {str(e) or type(e).__name__} (passes already run: {done})") from e
        log[p.name] = sites
    return gm, log
