"""Why a tensor is kept and what would remove it, by the kind of node."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from floorplan.graph.fold import to_affine, to_site
from floorplan.layers.activations import PackedActivation
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.pools import PackedMaxPool
from floorplan.ledger.pillars import PILLARS, WHY, fix_for, packed_bits, pillar_of, site_groups
from floorplan.ledger.recorder import Saved

SITE = to_site(nn.Conv2d(4, 4, 1, groups=2))
SITE.adapt(2, torch.Generator())
LAYERS: dict[str, nn.Module] = {
    "site": SITE,
    "frozen": to_site(nn.Conv2d(4, 4, 1)),
    "affine": to_affine(nn.BatchNorm2d(4)),
    "gate": PackedActivation("ReLU"),
    "pool": PackedMaxPool([3, 3], [1, 1], [0, 0], [1, 1]),
    "lossy": LossyActivation("SiLU", 3),
    "fc": nn.Linear(2, 2),
    "conv": nn.Conv2d(2, 2, 1),
}
GM = fx.GraphModule(nn.ModuleDict(LAYERS), fx.Graph())
for _name, _layer in LAYERS.items():
    GM.add_module(_name, _layer)


def saved(op: str = "", module: str = "") -> Saved:
    op = op or type(LAYERS[module]).__name__
    return Saved("n", op, module, (4,), torch.float32, 0, "kept", "aten.add.Tensor", 16, 16)


@pytest.mark.parametrize(
    "op,pillar",
    [
        ("BatchNorm2d", "normalization"),
        ("layer_norm", "normalization"),
        ("Conv2d", "convolution"),
        ("conv_transpose2d", "convolution"),
        ("MaxPool2d", "pooling"),
        ("adaptive_avg_pool2d", "pooling"),
        *((a, "activation") for a in "relu Hardswish GELU tanh ELU softmax clamp_min threshold".split()),
        ("mul", "other"),
        ("Linear", "other"),
    ],
)
def test_functions_and_torchs_layers_go_by_their_names(op: str, pillar: str) -> None:
    assert pillar_of(saved(op), GM, False) == pillar and pillar_of(saved(op), GM, True) == "gate"
    assert pillar in PILLARS and WHY.keys() == set(PILLARS)


def test_our_layers_say_it_themselves() -> None:
    told = {m: pillar_of(saved(module=m), GM, False) for m in ("site", "affine", "conv", "fc")}
    assert told == {"site": "adapter", "affine": "normalization", "conv": "convolution", "fc": "other"}
    assert {m: site_groups(saved(module=m), GM) for m in ("site", "frozen", "conv")} == {
        "site": 2,
        "frozen": None,
        "conv": None,
    }
    assert site_groups(saved("relu"), GM) is None
    assert {m: packed_bits(saved(module=m), GM) for m in ("gate", "pool", "lossy")} == {
        "gate": 1,
        "pool": 4,
        "lossy": 4,
    }


@pytest.mark.parametrize(
    "given,way_out",
    [
        ({"op": "relu"}, "keeps one bit"),
        ({"op": "BatchNorm2d"}, "folds an eval BatchNorm"),
        ({"module": "conv"}, "keeps q in its place"),
        ({"op": "MaxPool2d"}, "packed window offsets"),
        ({"module": "site"}, "lower the rank"),
        ({"module": "fc"}, "freeze the layer"),
        ({"op": "mul"}, "recompute it in the backward"),
    ],
)
def test_every_pillar_has_a_way_out(given: dict[str, Any], way_out: str) -> None:
    assert way_out in fix_for(saved(**given), GM)
