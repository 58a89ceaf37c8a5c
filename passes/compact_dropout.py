"""Let dropouts keep one bit a decision.

y = Dropout(x)  ->  y = PackedDropout(x)     keeps a bit an element instead of a float
y = Dropout2d(x)  ->  y = PackedDropout(x)   keeps a bit a (sample, channel)
"""

from collections.abc import Iterator

from torch import fx

from floorplan.compact_dropout import PackedDropout, dropout_refusal, is_dropout
from floorplan.compact_swap import swap
from floorplan.driver import Pass, Site


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Replace the dropout modules of `gm`; the random numbers stay torch's own."""
    return swap(gm, is_dropout, dropout_refusal, PackedDropout.of)


PASS = Pass("compact_dropout", run)
