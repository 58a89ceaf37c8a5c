"""Let every two-valued activation keep one bit an element.

    y = ReLU(z)  ->  y = PackedActivation(ReLU)(z)      keeps lo < z < hi instead of y

Fused sites hold their activation themselves and are no activation nodes: they stay as they are.
"""

from collections.abc import Iterator

from torch import fx

from floorplan.graph.driver import Pass, Site
from floorplan.graph.swap import swap
from floorplan.layers.activations import PackedActivation, activation_refusal, record_of


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Replace the activation modules of `gm` that have a gate."""
    return swap(gm, lambda m: record_of(m) is not None, activation_refusal, PackedActivation.of)


PASS = Pass("pack_gates", run)
