"""Stored modules: classes of the list alone, rebuilt from constructor arguments and compared."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import conv_record, document, refused, round_trip, same, step, with_leaf
from torch import fx, nn

from floorplan.layers.activations import PackedActivation
from floorplan.layers.dropout import PackedDropout
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.plain import AnyBatchNorm, Clamp, TrainingFlag
from floorplan.layers.pools import PackedMaxPool, ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.store.graphs import Reader
from floorplan.store.modules import build, encode_module, own_classes

CLASSES = """
subprocess.Popen torch.nn.Module torch.nn.Sequential torch.nn.Transformer torch.nn.LazyLinear
torch.nn.modules.module.Module torch.nn.utils.parametrize.ParametrizationList builtins.dict
torch.jit.ScriptModule torch.nn.ReLU.__class__ floorplan.layers.fused.ACTIVATIONS torch.fx.GraphModule
part
""".split()


@pytest.mark.parametrize("name", CLASSES)
def test_hostile_classes(name: str) -> None:
    d = document()
    d["modules"].append({"path": "evil", "class": name, "config": {}, "training": True})
    refused(d, "evil")


@pytest.mark.parametrize(
    "config",
    [
        {"kernel_size": "big"},
        {"kernel_size": 1},
        {"in_channels": -1},
        {"groups": 0},
        {"device": "cpu"},
        {"dtype": {"dtype": "float64"}},
        {"out_channels": 10**12},
        {"padding": {"node": "x"}},
        {"bias": 1},
        {"stride": {"tuple": 3}},
        {"padding_mode": {"nope": 1}},
    ],
)
def test_hostile_configurations(config: dict[str, Any]) -> None:
    d = document()
    conv_record(d)["config"] |= config
    refused(d, "skip")


def test_modules_cannot_form_a_cycle() -> None:
    d = document()
    record = {"path": "body.loop", "class": "Module", "config": {}, "training": True}
    for target in ("body", "", "nowhere", "skip.weight", 3, ["body"]):
        bad = copy.copy(d)
        bad["modules"] = [*d["modules"], record | {"shared_with": target}]
        refused(bad, "body.loop")


@pytest.mark.parametrize("path", ["forward", "body", "skip", "skip.extra", "a.b", "__class__", 'a"', ""])
def test_module_places(path: str) -> None:
    d = document()
    d["modules"].append({"path": path, "class": "Module", "config": {}, "training": True})
    refused(d)


MODULES: list[nn.Module] = [
    nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="circular"),
    nn.Conv3d(2, 2, 3, padding="same", bias=False),
    nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1, dilation=2),
    nn.BatchNorm1d(3, eps=1e-3, affine=False),
    nn.BatchNorm3d(3, track_running_stats=False, momentum=None),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    nn.GroupNorm(2, 4, affine=False),
    nn.LayerNorm((3, 4), elementwise_affine=False),
    nn.RMSNorm(4),
    nn.LocalResponseNorm(2),
    nn.Linear(3, 2, bias=False),
    nn.Bilinear(2, 3, 4),
    nn.Identity(),
    nn.Embedding(5, 3, padding_idx=1, max_norm=1.0),
    nn.EmbeddingBag(5, 3, mode="max", padding_idx=2),
    nn.MaxPool2d(3, 2, 1, dilation=2, return_indices=True, ceil_mode=True),
    nn.AvgPool2d(2, count_include_pad=False, divisor_override=3),
    nn.AdaptiveAvgPool2d((None, 2)),
    nn.AdaptiveMaxPool1d(2),
    nn.LPPool2d(2.0, 3),
    nn.MaxUnpool2d(2),
    nn.ReflectionPad2d((1, 2, 0, 1)),
    nn.ConstantPad1d(2, 0.5),
    nn.ZeroPad2d(1),
    nn.Hardtanh(-2.0, 3.0, True),
    nn.ReLU6(True),
    nn.LeakyReLU(0.3),
    nn.ELU(0.5),
    nn.RReLU(),
    nn.Threshold(0.1, 20.0),
    nn.Softplus(2.0),
    nn.GELU("tanh"),
    nn.GLU(1),
    nn.Softmax(1),
    nn.Hardswish(True),
    nn.PReLU(2, 0.1),
    nn.Dropout2d(0.3, True),
    nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True),
    nn.UpsamplingNearest2d((4, 4)),
    nn.PixelShuffle(2),
    nn.ChannelShuffle(2),
    nn.Flatten(1, 2),
    nn.Unflatten(1, (2, 3)),
    nn.Unfold(3, padding=1),
    nn.CosineSimilarity(0),
    nn.PairwiseDistance(3.0),
    nn.LSTM(3, 4, 2, bias=False, dropout=0.1, proj_size=2),
    nn.GRU(3, 4, bidirectional=True),
    nn.RNN(3, 4, nonlinearity="relu"),
    nn.GRUCell(3, 4),
    nn.MultiheadAttention(4, 2, 0.1, bias=False, kdim=3, vdim=5, add_zero_attn=True),
    nn.SyncBatchNorm(3),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_torch_module_configurations(module: nn.Module) -> None:
    name, config = encode_module(module, "module m")
    rebuilt = build(name, config, Reader(), "module m")
    assert type(rebuilt) is type(module)
    assert repr(rebuilt) == repr(module)
    assert all(t.is_meta for t in (*rebuilt.parameters(), *rebuilt.buffers()))


def adapted(scale: bool = True) -> nn.Module:
    """A fused 3x3 site with a rank-2 adapter that does something, and a two-sided gate."""
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    site = FusedConv(geometry_of(conv).config(), [4, 3, 3, 3], scale=scale, act={"name": "ReLU6", "options": {}})
    site.adapt(2, torch.Generator().manual_seed(0))
    for t in (site.get_buffer("weight"), site.get_parameter("U").data):
        nn.init.normal_(t)
    return site


OWN: dict[str, Callable[[], nn.Module]] = {
    "FusedConv": adapted,
    "ChannelAffine": lambda: ChannelAffine(3),
    "PackedActivation": lambda: PackedActivation("LeakyReLU", {"negative_slope": 0.2}),
    "PackedDropout": lambda: PackedDropout("Dropout2d", 0.5),
    "PackedMaxPool": lambda: PackedMaxPool([2, 2], [2, 2], [0, 0], [1, 1]),
    "ShapeAvgPool": lambda: ShapeAvgPool([2, 2], [2, 2], [0, 0]),
    "ShapeAdaptiveAvgPool": lambda: ShapeAdaptiveAvgPool([1, None]),
    "Clamp": lambda: Clamp(0.0, 6.0),
    "AnyBatchNorm": lambda: AnyBatchNorm(3, eps=1e-3),
    "LossyActivation": lambda: LossyActivation("GELU", 2, {"approximate": "tanh"}, fit="minimax"),
}


# Layers of methods come and go by files in test_methods.
OF_METHODS = {
    "FactorConv",
    "FrozenConv",
    "LiteResidual",
    "LoraC",
    "LoraCOfficial",
    "PaperSite",
    "RankBranch",
    "SideConv",
    "TinySite",
}


OF_REMAT = {"Forgetful", "Keep", "Promise"}  # by files in test_remat


NO_TENSOR = {"TrainingFlag"}  # gives a flag, see test_a_training_flag_survives


def test_every_own_class_is_covered() -> None:
    tested = {*OWN, *NO_TENSOR, *OF_METHODS, *OF_REMAT}
    assert {name.rpartition(".")[2] for name in own_classes()} == tested


def test_a_training_flag_survives(tmp_path: Path) -> None:
    graph = fx.Graph()
    x, flag = graph.placeholder("x"), graph.call_module("leaf")
    graph.output(graph.call_function(torch.nn.functional.dropout, (x, 0.5, flag)))
    back = round_trip(fx.GraphModule({"leaf": TrainingFlag()}, graph), tmp_path)
    ones = torch.ones(64)
    assert torch.equal(back.eval()(ones), ones) and not torch.equal(back.train()(ones), ones)


@pytest.mark.parametrize("name", OWN)
def test_own_modules(name: str, tmp_path: Path) -> None:
    gm = with_leaf(OWN[name]())
    back = round_trip(gm, tmp_path)
    assert type(back.leaf) is type(gm.leaf)
    results = []
    for model in (gm, back):
        torch.manual_seed(0)
        results.append(step(model))
    same(results[0], results[1])
    assert list(back.state_dict()) == list(gm.state_dict())
