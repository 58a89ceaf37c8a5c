"""A rank-r branch beside a conv, such as RankBranch, into that conv's weight.

conv(x) + RankBranch(x)        ->   conv(x)
FusedConv(x, RankBranch(x))    ->   FusedConv(x)
FusedConv(x, RankBranch(F.pad(x)))   ->   FusedConv(x)     the site had drawn the padding in
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.edit import PAD, calls_of, module_calls, padded
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import CONVS, geometry_of
from floorplan.layers.layer import Adapter
from floorplan.methods.plain import exact


@dataclass(frozen=True)
class BranchPair:
    """A branch, the conv beside it, and the add of both (None: the site adds by itself)."""

    branch: fx.Node
    base: fx.Node
    add: fx.Node | None


def branch_pairs(gm: fx.GraphModule) -> Iterator[BranchPair]:
    """Every call of a branch with its conv; FloorplanError for one without."""
    for node, m in module_calls(gm, Adapter):
        if not cast(Adapter, m).beside:
            continue
        pair = _pair(gm, node, m)
        if isinstance(pair, str):
            raise FloorplanError(f"merge: {node.target} ({type(m).__name__}): {pair}; keep the model as it is")
        yield pair


def _pair(gm: fx.GraphModule, node: fx.Node, branch: nn.Module) -> BranchPair | str:
    users = list(node.users)
    base = users[0] if len(users) == 1 else None
    add: fx.Node | None = None
    if base is not None and base.target in (operator.add, operator.iadd):
        add, others = base, [a for a in base.args if a is not node]
        base = others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None
    if base is None or base.op != "call_module":
        return "nothing adds it to a conv"
    m = gm.get_submodule(str(base.target))
    if not isinstance(m, (FusedConv, *CONVS)):
        return f"it is added to a {type(m).__name__}, not to a conv"
    if len(calls_of(gm, str(base.target))) > 1:
        return f"{base.target} is called more than once"
    if add is None and base.args[1:] != (node,):
        return f"{base.target} reads it"
    ends = isinstance(m, FusedConv) and (m.act is not None or len(base.args) > 1)
    if add is not None and (ends or len(base.users) > 1):
        return f"{base.target} has another reader before the add"
    if not _reads_the_same(base, m, node, branch):
        return f"it does not read what {base.target} reads"
    return BranchPair(node, base, add)


def _reads_the_same(base: fx.Node, conv: nn.Module, node: fx.Node, branch: nn.Module) -> bool:
    geo, own = geometry_of(conv), geometry_of(branch)
    x, source = node.args[0], base.args[0]
    if x is source:
        return own == geo
    if not isinstance(x, fx.Node) or x.target is not F.pad:
        return False
    options: dict[str, Any] = dict(zip(PAD, x.args, strict=False)) | x.kwargs
    return options["input"] is source and padded(own, options) == geo


def absorb_branches(gm: fx.GraphModule) -> None:
    """Add every branch's weight to its conv's, and drop branch and add from the graph."""
    done: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # calls of one conv stay on one weight
    for pair in list(branch_pairs(gm)):
        conv: Any = gm.get_submodule(str(pair.base.target))
        branch = gm.get_submodule(str(pair.branch.target))
        old, key = conv.weight, (id(conv.weight), id(branch))
        if key not in done:
            total = old.detach().to("cpu", torch.float64) + exact(branch).delta().detach()
            done[key] = (old, total.to(old))  # the old one too, so that its id does not come twice
        total = done[key][1]
        conv.weight = total if isinstance(conv, FusedConv) else nn.Parameter(total)
        if pair.add is None:
            pair.base.args = (pair.base.args[0],)
        else:
            pair.add.replace_all_uses_with(pair.base)
            gm.graph.erase_node(pair.add)
        source = pair.branch.args[0]
        gm.graph.erase_node(pair.branch)
        if isinstance(source, fx.Node) and source.target is F.pad and not source.users:
            gm.graph.erase_node(source)
