"""Why a tensor is kept, and what would remove it: tables keyed by the kind of node."""

from torch import fx, nn

from floorplan.layers.activations import ACTIVATIONS
from floorplan.layers.layer import Adapter, Layer
from floorplan.ledger.recorder import Saved

PILLARS = ("activation", "normalization", "convolution", "pooling", "adapter", "gate", "other")

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("normalization", ("norm", "affine")),
    ("convolution", ("conv",)),
    ("pooling", ("pool",)),
    ("activation", ("activation", *dict.fromkeys(a.word for a in ACTIVATIONS.values()))),
)
_SPELLED = {name for a in ACTIVATIONS.values() for name in a.functions.split()}

WHY = {
    "activation": "the activation's derivative is computed from its input or its result",
    "normalization": "the normalization's backward needs its input",
    "convolution": "the weight's gradient needs the input; PyTorch keeps it even when the weight is frozen",
    "pooling": "the pool's backward keeps its input (and int64 indices) although only offsets are needed",
    "adapter": "the up-projection's gradient needs the rank-r bottleneck q",
    "gate": "one bit an element tells where the gradient passes",
    "other": "the operation's backward formula uses it",
}


def layer_of(s: Saved, gm: nn.Module | None) -> Layer | None:
    """The layer of ours that saved s, None if something else did."""
    m = gm.get_submodule(s.module) if gm is not None and s.module else None
    return m if isinstance(m, Layer) else None


def pillar_of(s: Saved, gm: nn.Module | None, packed: bool) -> str:
    """The pillar of one saved tensor: what a layer of ours says, by its name for all others."""
    if packed:
        return "gate"
    if (layer := layer_of(s, gm)) is not None:
        return layer.pillar
    name = s.op.lower()
    for pillar, words in _KINDS:
        if any(w in name for w in words):
            return pillar
    return "activation" if name.rstrip("_") in _SPELLED else "other"


def site_groups(s: Saved, gm: fx.GraphModule) -> int | None:
    """Groups of the adapter that saved s, None if it was saved elsewhere."""
    site = layer_of(s, gm)
    return site.geo.groups if isinstance(site, Adapter) and site.rank and site.geo is not None else None


def packed_bits(s: Saved, gm: fx.GraphModule) -> float:
    """Bits an element: one of a gate or a dropout decision, more of a max-pool's offset or a lossy derivative."""
    layer = layer_of(s, gm)
    return 1.0 if layer is None else layer.packed_bits


_FIX = {
    "activation": "if it is piecewise linear, `floorplan rewrite` keeps one bit; a smooth one needs exact "
    "recomputation or a labelled lossy derivative",
    "normalization": "`floorplan rewrite` folds an eval BatchNorm; statistics of the batch or sample cannot fold",
    "convolution": "`floorplan rewrite --rank r` keeps q in its place, or freezes the layer so nothing is kept",
    "pooling": "`floorplan rewrite` keeps packed window offsets (max) or shapes only (average)",
    "adapter": "lower the rank",
    "gate": "nothing: this is the floor",
    "other": "recompute it in the backward, or rewrite the expression with a gateable activation",
}


def fix_for(s: Saved, gm: fx.GraphModule) -> str:
    """What would remove one guilty tensor."""
    if s.module and isinstance(gm.get_submodule(s.module), nn.Linear):
        return "freeze the layer, as `floorplan rewrite` does without --train-head: a frozen linear keeps nothing"
    return _FIX[pillar_of(s, gm, False)]
