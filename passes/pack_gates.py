"""Let every two-valued activation keep one bit an element.

    y = ReLU(z)  ->  y = PackedActivation(ReLU)(z)      keeps lo < z < hi instead of y

Fused sites hold their activation themselves and are no activation nodes: they stay as they are.
"""

from functools import partial

from floorplan.graph.driver import Pass
from floorplan.graph.edit import swap
from floorplan.layers.activations import PackedActivation, record_of

PASS = Pass("pack_gates", partial(swap, twin=lambda m: PackedActivation.of(m) if record_of(m) else None))
