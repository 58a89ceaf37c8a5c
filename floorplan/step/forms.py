"""Which sites run as two branches and which merged, by what each costs at a part size.

merged   one temporary like W, r*|W| multiply-adds           twice a part
branch   q -> O at full width, added in place: nothing for 1x1 convs, an eighth of the map for others
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from floorplan.layers.fused import FusedConv
from floorplan.step.ops import PARTS, is_matrix


def branches(
    gm: fx.GraphModule, values: Mapping[str, Any], samples: int | Mapping[str, int], small: bool = False
) -> tuple[str, ...]:
    """Nodes whose site should run as two branches, for parts of `samples` (one number, or one a node).

    fast: where the weight outweighs the site's maps. small: wherever the temporary is the smaller one.
    """
    out = []
    for n in gm.graph.nodes:
        m = gm.get_submodule(str(n.target)) if n.op == "call_module" else None
        if not isinstance(m, FusedConv) or not m.rank or n.name not in values:
            continue
        size = samples if isinstance(samples, int) else samples.get(n.name, 1)
        x, z = (values[v.name][0].numel() for v in (n.args[0], n))
        spare = 0 if is_matrix(m) else size * z / min(PARTS, size)
        if m.weight.numel() > (spare if small else size * (x + z)):
            out.append(n.name)
    return tuple(out)
