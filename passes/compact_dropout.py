"""Let dropouts keep one bit a decision.

y = Dropout(x)  ->  y = PackedDropout(x)     keeps a bit an element instead of a float
y = Dropout2d(x)  ->  y = PackedDropout(x)   keeps a bit a (sample, channel)
"""

from collections.abc import Iterator

from torch import fx

from floorplan.graph.driver import Pass, Site
from floorplan.graph.swap import swap
from floorplan.layers.dropout import PackedDropout, dropout_refusal, is_dropout


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Replace the dropout modules of `gm`; the random numbers stay torch's own."""
    return swap(gm, is_dropout, dropout_refusal, PackedDropout.of)


PASS = Pass("compact_dropout", run)
