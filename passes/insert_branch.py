"""Ablations of MemFLoRA's Table 4: a rank-r branch of two convs beside the frozen site.

y = FusedConv(x)   ->   y = FusedConv(x) + RankBranch(x)     see floorplan.layers.branch

The add is a node like any other: fuse_sites gives it to the site, with the activation behind it.
"""

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from floorplan.graph.choose import as_pass
from floorplan.graph.driver import Pass
from floorplan.graph.edit import calls_of, free_path, set_module
from floorplan.layers.branch import RankBranch
from floorplan.layers.fused import FusedConv
from floorplan.passes.insert_memflora import Insert


@dataclass(frozen=True)
class Branch(Insert):
    kernel: str = "up"  # which factor has the conv's kernel: up or down
    bn: bool = False  # a trained BatchNorm of q in the place of a

    def adapt(self, gm: fx.GraphModule, path: str, site: FusedConv, generator: torch.Generator) -> str:
        if site.geo.transposed:
            return "a branch of two convs is defined for convs, not for transposed ones"
        if site.geo.groups > 1:
            return f"a branch of two convs is defined for ungrouped convs; this one has {site.geo.groups} groups"
        scale, site.scale = site.scale, None  # the frozen site does not read it
        form = "bn" if self.bn else "none" if scale is None else "a"
        w = site.weight
        branch = RankBranch(site.geo.config(), list(w.shape), self.rank, self.kernel, form)
        branch = branch.to(device=w.device, dtype=w.dtype).train(site.training)
        branch.P.copy_(torch.randn(branch.P.shape, generator=generator, dtype=torch.float64) / math.sqrt(self.rank))
        if form == "a":
            branch.scale = scale
        where = free_path(gm, f"{path}_branch")
        set_module(gm, where, branch)
        for node in calls_of(gm, path):
            _beside(gm, node, where)
        return ""


def _beside(gm: fx.GraphModule, node: fx.Node, path: str) -> None:
    """node(x) becomes node(x) + branch(x), the branch first: the site can then take it as its skip."""
    with gm.graph.inserting_before(node):
        extra = gm.graph.call_module(path, node.args)
    with gm.graph.inserting_after(node):
        total = gm.graph.call_function(operator.add, (node, extra))
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def branch(
    rank: int = 2, sites: str = "auto", seed: int = 0, train_head: bool = False, kernel: str = "up", bn: bool = False
) -> Pass:
    """The pass with its options set."""
    return as_pass("insert_branch", Branch)(rank, sites, seed, train_head, kernel=kernel, bn=bn)
