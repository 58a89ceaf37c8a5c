"""Which sites run as two branches and which merged, by what each costs at a part size.

merged   one temporary like W, r*|W| multiply-adds           twice a part
branch   q -> O at full width, added in place: nothing for 1x1 convs, an eighth of the map for others
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from floorplan.layers.fused import FusedConv


def branches(gm: fx.GraphModule, values: Mapping[str, Any], samples: int | Mapping[str, int]) -> tuple[str, ...]:
    """Nodes whose weight outweighs the site's maps: two branches are faster, for parts of `samples` (or one a node)."""
    out = []
    for n in gm.graph.nodes:
        m = gm.get_submodule(str(n.target)) if n.op == "call_module" else None
        if not isinstance(m, FusedConv) or not m.rank or n.name not in values:
            continue
        size = samples if isinstance(samples, int) else samples.get(n.name, 1)
        x, z = (values[v.name][0].numel() for v in (n.args[0], n))
        if m.weight.numel() > size * (x + z):
            out.append(n.name)
    return tuple(out)
