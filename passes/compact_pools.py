"""Let pools keep offsets of a few bits, or only shapes.

y = MaxPool(x)  ->  y = PackedMaxPool(x)     keeps offsets instead of x and an int64 index map
y = AvgPool(x)  ->  y = ShapeAvgPool(x)      keeps a shape instead of x
"""

from functools import partial

from floorplan.graph.driver import Pass
from floorplan.graph.edit import swap
from floorplan.layers.pools import compact_pool

PASS = Pass("compact_pools", partial(swap, twin=compact_pool))
