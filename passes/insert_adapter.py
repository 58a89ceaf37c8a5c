"""Freeze the model and put a ConvAdapter in the place of the chosen convs; BatchNorms stay as they are.

conv(x, W)  ->  LoraC, LoraCOfficial, SideConv, FactorConv, a layer from outside (x)
see floorplan.layers.lora, floorplan.layers.factor
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx, nn

from floorplan.graph.choose import Insertion, as_pass, convs_of
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import set_module
from floorplan.layers.adapter import ConvAdapter
from floorplan.layers.factor import FactorConv
from floorplan.layers.layer import Adapter
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv

Make = Callable[[nn.Module, int, torch.Generator], ConvAdapter | str]
ALPHA = 2.0  # alpha/r, as in the MemFLoRA paper's baselines
KINDS: dict[str, Make] = {
    "lora-c": partial(LoraC.of, scale=ALPHA),
    "lora-c-official": partial(LoraCOfficial.of, scale=ALPHA),
    "lora-conv": partial(SideConv.of, scale=ALPHA),
    "lora-edge": FactorConv.edge,
    "lora-fa": partial(FactorConv.of, scale=ALPHA),
}


@dataclass(frozen=True, kw_only=True)
class Insert(Insertion):
    kind: str
    make: Make

    def insert(self, gm: fx.GraphModule, generator: torch.Generator) -> Iterator[Site]:
        convs = {path: m for path, m in convs_of(gm).items() if not isinstance(m, Adapter)}
        unfit, refused = self.choices(gm, convs)
        for path, conv in convs.items():
            why, layer = unfit.get(path) or refused[path], None
            if not why and isinstance(layer := self.make(conv, self.rank, generator), str):
                why = f"{self.kind} {layer}"
            if isinstance(layer, ConvAdapter):
                set_module(gm, path, layer)
            yield Site(path, why and f"{why}; frozen as it is")


def adapter(kind: str, make: Make, rank: int = 2, sites: str = "auto", seed: int = 0, train_head: bool = False) -> Pass:
    """The pass with its options set; make(conv, rank, generator): a layer, or why there is none (`ConvAdapter.of`)."""
    return as_pass(f"insert_{kind}", Insert)(rank, sites, seed, train_head, kind=kind, make=make)


def lora(kind: str, rank: int = 2, sites: str = "auto", seed: int = 0, train_head: bool = False) -> Pass:
    """The pass of a LoRA baseline, one of KINDS."""
    return adapter(kind, KINDS[kind], rank, sites, seed, train_head)
