"""Which sites run as two branches and which merged, by what each costs at a part size.

merged   one temporary like W, r*|W| multiply-adds           twice a part
branch   q -> O at full width, added in place: nothing for 1x1 convs, an eighth of the map for others
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from floorplan.graph.edit import module_calls
from floorplan.layers.fused import FusedConv


def branches(gm: fx.GraphModule, values: Mapping[str, Any], samples: int | Mapping[str, int]) -> tuple[str, ...]:
    """Nodes whose weight outweighs the site's maps: two branches are faster, for parts of `samples` (or one a node)."""
    out = []
    sites: Iterator[tuple[fx.Node, Any]] = module_calls(gm, FusedConv)
    for n, m in sites:
        if m.rank and n.name in values:
            size = samples if isinstance(samples, int) else samples.get(n.name, 1)
            x, z = (values[v.name][0].numel() for v in (n.all_input_nodes[0], n))
            out += [n.name] if m.weight.numel() > size * (x + z) else []
    return tuple(out)
