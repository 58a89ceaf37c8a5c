"""Freeze the model and give the chosen convs a MemFLoRA adapter.

conv(x, W)   ->   FusedConv(x, W + a*(U o P))     P frozen, U trained; keeps q = conv1x1(x, P)
conv(x, W)   ->   FusedConv(x, W)                 not chosen: frozen, keeps nothing
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from floorplan.graph.choose import Insertion, as_pass, convs_of
from floorplan.graph.driver import Site
from floorplan.graph.edit import set_module
from floorplan.graph.fold import to_site
from floorplan.layers.fused import FusedConv


@dataclass(frozen=True)
class Insert(Insertion):
    projection: str = "normal"  # how P is drawn: one of floorplan.layers.lowrank.PROJECTIONS
    scaled: bool = True  # the adapter is scaled by the folded BatchNorm's a

    def insert(self, gm: fx.GraphModule, generator: torch.Generator) -> Iterator[Site]:
        """Every conv that can be a site becomes one; those that are chosen get an adapter."""
        convs = convs_of(gm)
        unfit, refused = self.choices(gm, convs)
        for path, conv in convs.items():
            if path in unfit:
                yield Site(path, f"{unfit[path]}; frozen as it is")
                continue
            site = conv if isinstance(conv, FusedConv) else to_site(conv)
            set_module(gm, path, site)
            why = refused[path] or self.adapt(gm, path, site, generator)
            full = self.rank == site.in_channels // site.geo.groups
            note = "its q is as wide as its input at this rank" if full and not why else ""
            yield Site(path, why and f"{why}; frozen", note)

    def adapt(self, gm: fx.GraphModule, path: str, site: FusedConv, generator: torch.Generator) -> str:
        """Give a site its adapter; why it cannot have one, "" if it has."""
        site.adapt(self.rank, generator, self.projection)
        site.scale = site.scale if self.scaled else None
        return ""


memflora = as_pass("insert_memflora", Insert)
