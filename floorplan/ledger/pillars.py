"""Why a tensor is kept, and what would remove it: tables keyed by the kind of node."""

import math

from torch import fx, nn

from floorplan.layers.adapter import Adapter
from floorplan.layers.fused import ChannelAffine
from floorplan.layers.geometry import Geometry
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.max_pools import PackedMaxPool, fewest_bits
from floorplan.ledger.recorder import Saved

PILLARS = ("activation", "normalization", "convolution", "pooling", "adapter", "gate", "other")

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("normalization", ("norm", "affine")),
    ("convolution", ("conv",)),
    ("pooling", ("pool",)),
    (
        "activation",
        (
            "relu",
            "silu",
            "swish",
            "gelu",
            "sigmoid",
            "tanh",
            "elu",
            "mish",
            "soft",
            "clamp",
            "activation",
            "shrink",
            "threshold",
            "glu",
        ),
    ),
)

WHY = {
    "activation": "the activation's derivative is computed from its input or its result",
    "normalization": "the normalization's backward needs its input",
    "convolution": "the weight's gradient needs the input; PyTorch keeps it even when the weight is frozen",
    "pooling": "the pool's backward keeps its input (and int64 indices) although only offsets are needed",
    "adapter": "the up-projection's gradient needs the rank-r bottleneck q",
    "gate": "one bit an element tells where the gradient passes",
    "other": "the operation's backward formula uses it",
}


_ADAPTERS = ("FusedConv", "FactorConv", "PaperSite", "RankBranch")  # what they keep, they keep of rank r


def pillar_of(s: Saved, packed: bool) -> str:
    """The pillar of one saved tensor."""
    if packed:
        return "gate"
    if s.op in _ADAPTERS:
        return "adapter"
    if s.op == ChannelAffine.__name__:
        return "normalization"
    name = s.op.lower()
    for pillar, words in _KINDS:
        if any(w in name for w in words):
            return pillar
    return "other"


def site_groups(s: Saved, gm: fx.GraphModule) -> int | None:
    """Groups of the adapter that saved s, None if it was saved elsewhere."""
    site = gm.get_submodule(s.module) if s.module else None
    geo = vars(site).get("geo") if isinstance(site, Adapter) and site.rank else None
    return geo.groups if isinstance(geo, Geometry) else None


def packed_bits(s: Saved, gm: fx.GraphModule) -> float:
    """Bits an element: one of a gate or a dropout decision, more of a max-pool's offset or a lossy derivative."""
    layer = gm.get_submodule(s.module) if s.module else None
    if isinstance(layer, LossyActivation):
        return float(layer.stored_bits)
    return float(fewest_bits(math.prod(layer.kernel))) if isinstance(layer, PackedMaxPool) else 1.0


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
    if s.module:
        m = gm.get_submodule(s.module)
        if isinstance(m, nn.Linear):
            return "freeze the layer, as `floorplan rewrite` does without --train-head: a frozen linear keeps nothing"
    return _FIX[pillar_of(s, False)]
