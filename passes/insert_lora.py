"""The LoRA baselines: each a layer that `insert_adapter` puts in the place of the chosen convs.

conv(x, W)  ->  LoraC, LoraCOfficial, SideConv, FactorConv (x)      see floorplan.layers.lora, floorplan.layers.factor
"""

from functools import partial

from floorplan.graph.driver import Pass
from floorplan.layers.factor import FactorConv
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv
from floorplan.passes.insert_adapter import Make, adapter

ALPHA = 2.0  # alpha/r, as in the MemFLoRA paper's baselines
KINDS: dict[str, Make] = {
    "lora-c": partial(LoraC.of, scale=ALPHA),
    "lora-c-official": partial(LoraCOfficial.of, scale=ALPHA),
    "lora-conv": partial(SideConv.of, scale=ALPHA),
    "lora-edge": FactorConv.edge,
    "lora-fa": partial(FactorConv.of, scale=ALPHA),
}


def lora(kind: str, rank: int = 2, sites: str = "auto", seed: int = 0, train_head: bool = False) -> Pass:
    """The pass with its options set; `kind` is one of KINDS."""
    return adapter(kind, KINDS[kind], rank, sites, seed, train_head)
