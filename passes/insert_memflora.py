"""Freeze the model and give the chosen convs a MemFLoRA adapter.

conv(x, W)   ->   FusedConv(x, W + a*(U o P))     P frozen, U trained; keeps q = conv1x1(x, P)
conv(x, W)   ->   FusedConv(x, W)                 not chosen: frozen, keeps nothing
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from floorplan.errors import FloorplanError
from floorplan.graph.choose import choose, shape_of
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES, module_calls, set_module, train_head
from floorplan.graph.fold import call_reason, conv_reason, to_site
from floorplan.layers.fused import FusedConv


@dataclass(frozen=True)
class Insert:
    """Options of the pass; calling it runs it."""

    rank: int = 2
    sites: str = "auto"  # auto, all, pointwise, or globs over conv paths, comma-separated
    seed: int = 0
    train_head: bool = False
    projection: str = "normal"  # how P is drawn: one of floorplan.layers.fused.PROJECTIONS
    scaled: bool = True  # the adapter is scaled by the folded BatchNorm's a

    def __call__(self, gm: fx.GraphModule) -> Iterator[Site]:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise FloorplanError(f"rank {self.rank}: an adapter has a whole rank of 1 or more")
        if not isinstance(self.sites, str):
            raise FloorplanError(f"sites {self.sites}: write a string: auto, all, pointwise, or comma-separated globs")
        gm.requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed)
        found = dict.fromkeys(str(n.target) for n, _ in module_calls(gm, FusedConv, *CONV_TYPES))
        made = {path: _site_at(gm, path) for path in found}
        shapes = {path: shape_of(s) for path, s in made.items() if isinstance(s, FusedConv)}
        refused = choose(shapes, self.sites, self.rank)
        adapted = 0
        for path, site in made.items():
            if isinstance(site, str):
                yield Site(path, f"{site}; frozen as it is")
            elif why := refused[path]:
                yield Site(path, f"{why}; frozen")
            elif why := self._adapt(gm, path, site, generator):
                yield Site(path, f"{why}; frozen")
            else:
                adapted += 1
                full = self.rank == shapes[path].width
                yield Site(path, note="its q is as wide as its input at this rank" if full else "")
        if not adapted and not found and (computed := _functional_conv(gm)):
            raise FloorplanError(
                f"no conv can be adapted: {computed} convolves with a computed weight "
                "(weight standardisation, a reparametrization); bake the weight first"
            )
        if not adapted:
            looked = f"{len(found)} looked at with --sites {self.sites} --rank {self.rank}"
            advice = "try --sites all or a smaller rank" if found else "its graph has no conv layer"
            raise FloorplanError(f"no conv was adapted ({looked}); {advice}")
        if self.train_head:
            train_head(gm)

    def _adapt(self, gm: fx.GraphModule, path: str, site: FusedConv, generator: torch.Generator) -> str:
        """Give a site its adapter; why it cannot have one, "" if it has."""
        site.adapt(self.rank, generator, self.projection)
        site.scale = site.scale if self.scaled else None
        return ""


def _functional_conv(gm: fx.GraphModule) -> str:
    """The first conv left that is no module: its weight is the result of other nodes."""
    calls = (n for n in gm.graph.nodes if n.op == "call_function")
    return next((n.name for n in calls if "conv" in getattr(n.target, "__name__", "")), "")


def _site_at(gm: fx.GraphModule, path: str) -> FusedConv | str:
    m = gm.get_submodule(path)
    if isinstance(m, FusedConv):
        return m
    if why := conv_reason(m) or call_reason(gm, path):
        return why
    site = to_site(m)
    set_module(gm, path, site)
    return site


def memflora(
    rank: int = 2,
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    projection: str = "normal",
    scaled: bool = True,
) -> Pass:
    """The pass with its options set."""
    insert = Insert(rank, sites, seed, train_head, projection, scaled)
    return Pass("insert_memflora", insert, tolerance=1e-9)
