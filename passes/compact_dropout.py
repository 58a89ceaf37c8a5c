"""Let dropouts keep one bit a decision.

y = Dropout(x)  ->  y = PackedDropout(x)     keeps a bit an element instead of a float
y = Dropout2d(x)  ->  y = PackedDropout(x)   keeps a bit a (sample, channel)

The random numbers stay torch's own.
"""

from functools import partial

from floorplan.graph.driver import Pass
from floorplan.graph.edit import swap
from floorplan.layers.dropout import PackedDropout

PASS = Pass("compact_dropout", partial(swap, twin=PackedDropout.of))
