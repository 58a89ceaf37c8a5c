"""LOSSY, never in the default pipeline: let smooth activations keep a few bits of their derivative.

    y = SiLU(z)  ->  y = LossyActivation(SiLU, bits)(z)     keeps `bits` bits an element instead of z

Outputs stay exact; a gradient that passes such a node is off by at most the bound that its record states.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.copies import clone_structure
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import swap
from floorplan.layers.activations import record_of
from floorplan.layers.lossy import FITS, LossyActivation


def lossy(bits: int, fit: str = "normal") -> Pass:
    """The pass: 1 to 8 bits an element; fit "normal" (least squares for N(0, 1)) or "minimax"."""
    if isinstance(bits, bool) or not 1 <= bits <= 8:
        raise FloorplanError(f"lossy activations: {bits} bits; use 1 to 8")
    if fit not in FITS:
        raise FloorplanError(f"lossy activations: fit {fit} is not known; use {' or '.join(FITS)}")

    def twin(m: nn.Module) -> LossyActivation | str | None:
        return LossyActivation.of(m, bits, fit) if (a := record_of(m)) is not None and a.gate is None else None

    def run(gm: fx.GraphModule) -> Iterator[Site]:
        targets = {n.name: str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
        for site in swap(gm, twin):
            layer = gm.get_submodule(targets[site.node])
            yield replace(site, note=layer.extra_repr()) if isinstance(layer, LossyActivation) else site

    return Pass("lossy_activations", run)


def approximate(gm: fx.GraphModule, bits: int, fit: str = "normal") -> tuple[fx.GraphModule, list[Site]]:
    """A LOSSY copy of a graph on the same parameters, and what became of each smooth activation."""
    p = lossy(bits, fit)
    twin = clone_structure(gm)
    twin.meta = dict(gm.meta)
    sites = list(p.run(twin))
    twin.recompile()
    return twin, sites
