"""A branch beside a conv becomes part of it, or is refused."""

import operator
from typing import Any

import pytest
import torch
from hard_nets import same
from merges import X, kinds_in
from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.layers.branch import RankBranch
from floorplan.layers.geometry import geometry_of
from floorplan.methods.merge import difference, merge


def branched(add: Any = operator.add, swap: bool = False, read: bool = False) -> fx.GraphModule:
    """A conv and a branch beside it, by hand."""
    torch.manual_seed(0)
    conv = same(3, 6).double()
    geo = geometry_of(conv).config()
    root = nn.Module()
    root.conv, root.branch = conv, RankBranch(geo, [6, 3, 3, 3], 2, "up", "none").double()
    nn.init.normal_(root.branch.U)
    nn.init.normal_(root.branch.P)
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = (graph.call_module("conv", (x,)), graph.call_module("branch", (x,)))
    out = graph.call_function(add, parts[::-1] if swap else parts)
    graph.output((out, parts[0]) if read else out)
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("add", [operator.add, operator.iadd])
def test_a_branch_added_by_a_node(add: Any, swap: bool) -> None:
    gm = branched(add, swap)
    merged = merge(gm)
    assert kinds_in(merged) == ["Conv2d"]
    assert difference(gm, merged, (X.double(),)) <= 1e-12


def test_a_branch_without_a_conv_of_its_own_is_refused() -> None:
    with pytest.raises(FloorplanError, match="branch .RankBranch.: conv has another reader"):
        merge(branched(read=True))
    with pytest.raises(FloorplanError, match="branch .RankBranch.: nothing adds it to a conv"):
        merge(branched(operator.mul))
