"""Let pools keep offsets of a few bits, or only shapes.

y = MaxPool(x)  ->  y = PackedMaxPool(x)     keeps offsets instead of x and an int64 index map
y = AvgPool(x)  ->  y = ShapeAvgPool(x)      keeps a shape instead of x
"""

from collections.abc import Iterator

from torch import fx

from floorplan.graph.driver import Pass, Site
from floorplan.graph.swap import swap
from floorplan.layers.max_pools import compact_pool, is_pool, pool_refusal


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Replace the pool modules of `gm` that have a compact twin."""
    return swap(gm, is_pool, pool_refusal, compact_pool)


PASS = Pass("compact_pools", run)
