"""Which convs get an adapter: --sites auto, all, pointwise, or globs over conv paths."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from floorplan.graph.edit import is_depthwise
from floorplan.layers.fused import FusedConv


@dataclass(frozen=True)
class Shape:
    """What the choice looks at in a conv."""

    pointwise: bool
    depthwise: bool
    groups: int
    width: int  # input channels a group


def shape_of(conv: nn.Module) -> Shape:
    """The shape of a conv or a site."""
    c: Any = conv.geo if isinstance(conv, FusedConv) else conv
    kernel = c.kernel if isinstance(conv, FusedConv) else c.kernel_size
    inputs = int(conv.in_channels)  # type: ignore[arg-type]
    pointwise = all(k == 1 for k in kernel) and c.groups == 1
    return Shape(pointwise, is_depthwise(conv), c.groups, inputs // c.groups)


def choose(convs: Mapping[str, Shape], sites: str, rank: int) -> dict[str, str]:
    """Path -> why the conv gets no adapter, "" if it does."""
    chosen = _resolve(convs, sites, rank)
    return {path: _refusal(path, c, chosen, sites, rank) for path, c in convs.items()}


def _resolve(convs: Mapping[str, Shape], sites: str, rank: int) -> str:
    if sites != "auto":
        return sites
    if not any(c.depthwise for c in convs.values()):
        return "ungrouped"
    # A ConvNeXt has depthwise convs, but its pointwise layers are Linear: nothing would be left.
    some = any(not _refusal("", c, "pointwise", sites, rank) for c in convs.values())
    return "pointwise" if some else "ungrouped"


def _refusal(path: str, conv: Shape, chosen: str, sites: str, rank: int) -> str:
    if conv.depthwise:
        return "depthwise: one input channel a group, so q would be as wide as the input"
    if chosen == "pointwise" and not conv.pointwise:
        return "not a pointwise conv"
    if chosen == "ungrouped" and conv.groups > 1:
        return f"grouped ({conv.groups} groups); --sites all adapts it too"
    globs = chosen not in ("pointwise", "ungrouped", "all")
    if globs and not any(fnmatchcase(path, g.strip()) for g in chosen.split(",")):
        return f"not matched by --sites {chosen}"
    # At rank == width q is as big as the input: never chosen by itself, but a user may ask for it.
    if rank > conv.width or (sites == "auto" and rank == conv.width):
        return f"rank {rank} is no smaller than its input width {conv.width}"
    return ""
