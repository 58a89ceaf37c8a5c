"""The LoRA baselines: the layer each kind puts in, which convs it leaves alone, and how it starts."""

import copy
import math
from typing import Any

import pytest
import torch
from graphs import golden, run_passes
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import Site
from floorplan.layers.factor import FactorConv, tensor_train_suffix
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv
from floorplan.passes.insert_adapter import ALPHA, KINDS, lora

LAYERS = {
    "lora-c": LoraC,
    "lora-c-official": LoraCOfficial,
    "lora-conv": SideConv,
    "lora-edge": FactorConv,
    "lora-fa": FactorConv,
}
X = torch.randn(2, 8, 6, 5)


def net() -> nn.Module:
    """Spatial, grouped, depthwise, oblong, transposed and narrow convs, BatchNorms, a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 1, groups=2),
        nn.Conv2d(12, 12, 3, padding=1, groups=12),
        nn.Conv2d(12, 6, (1, 3), padding="same"),
        nn.ConvTranspose2d(6, 4, 1),
        nn.Conv2d(4, 2, 1, bias=False),
        nn.Conv2d(2, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def insert(kind: str, model: nn.Module | None = None, **options: Any) -> tuple[fx.GraphModule, list[Site]]:
    return run_passes(net() if model is None else model, [lora(kind, **options)], X)


def refused(log: list[Site]) -> dict[str, str]:
    return {s.node: s.refused.removesuffix("; frozen as it is") for s in log if s.refused}


DEPTHWISE = "depthwise: one input channel a group, so q would be as wide as the input"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_replaces_what_it_can(kind: str) -> None:
    gm, log = insert(kind, sites="all")
    why = {"4": DEPTHWISE, "6": f"{kind} is defined for convs, not for transposed ones"}
    if kind == "lora-c":
        why["3"] = "lora-c is defined for ungrouped 1-D and 2-D convs"
    if kind == "lora-c-official":
        why["5"] = "lora-c-official needs a square kernel"
    assert refused(log) == why and log[0].refused == ""
    layers = {n for n, m in gm.named_modules() if type(m) is LAYERS[kind]}
    assert layers == {"0", "3", "5", "7", "8"} - why.keys()
    trained = {n.rpartition(".") for n, p in gm.named_parameters() if p.requires_grad}
    names = {"U"} if LAYERS[kind] is FactorConv else {"A", "B"}
    assert {(path, name) for path, _, name in trained} == {(p, n) for p in layers for n in names}
    assert type(gm.get_submodule("1")) is nn.BatchNorm2d


@pytest.mark.parametrize("kind", KINDS)
def test_starts_as_the_source_to_the_bit(kind: str) -> None:
    source = net().double().eval()
    gm, _ = insert(kind, sites="all")
    assert torch.equal(gm.eval()(X.double()), source(X.double()))
    gm.train()
    source.train()
    assert torch.equal(gm(X.double()), source(X.double()))  # BatchNorms run as they did


def test_auto_leaves_grouped_and_spatial_convs_beside_depthwise_ones() -> None:
    _, log = insert("lora-edge")
    assert refused(log) == {
        "0": "not a pointwise conv",
        "3": "not a pointwise conv",
        "4": DEPTHWISE,
        "5": "not a pointwise conv",
        "6": "lora-edge is defined for convs, not for transposed ones",
        "8": "rank 2 is no smaller than its input width 2",
    }


def test_a_conv_called_in_another_way_or_hooked_stays() -> None:
    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda *a: None)
    _, log = insert("lora-c", nn.Sequential(nn.Conv2d(8, 4, 3), hooked))
    assert refused(log) == {"1": "it has hooks, which a fused site would drop"}


def test_edge_takes_the_suffix_of_the_weight_for_every_group() -> None:
    conv = nn.Conv2d(8, 6, 3, groups=2)
    layer: Any = insert("lora-edge", nn.Sequential(copy.deepcopy(conv)), rank=3, sites="all")[0].get_submodule("0")
    suffix = tensor_train_suffix(conv.weight.detach(), 3).double()
    assert layer.D.shape == (2, 3, 4, 3, 3) and layer.scale == 1 and not layer.U.any()
    for d in layer.D:
        torch.testing.assert_close(d, suffix, rtol=1e-5, atol=1e-6)
    cut = nn.Sequential(nn.Conv2d(8, 2, 1))
    layer = insert("lora-edge", cut, rank=4)[0].get_submodule("0")
    assert layer.rank == 2 and layer.U.shape == (2, 2)  # a bond is no wider than the output


@pytest.mark.parametrize("kind", ["lora-c", "lora-c-official", "lora-conv", "lora-fa"])
def test_the_seed_draws_the_down_factor(kind: str) -> None:
    def down(seed: int) -> Tensor:
        layer: Any = insert(kind, rank=2, seed=seed, sites="all")[0].get_submodule("0")
        assert layer.scale == ALPHA == 2.0
        t: Tensor = layer.D if kind == "lora-fa" else layer.A.detach()
        return t

    a = down(1)
    assert torch.equal(a, down(1)) and not torch.equal(a, down(2))
    fan = {"lora-c": 24, "lora-c-official": 24}.get(kind, 72)
    assert 0.8 / math.sqrt(fan) < float(a.abs().max()) <= 1 / math.sqrt(fan)


def test_the_draw_is_that_of_every_precision() -> None:
    model = net()
    single = lora("lora-fa", sites="all").run(gm := fx.symbolic_trace(copy.deepcopy(model)))
    assert len(list(single)) == 7
    double = insert("lora-fa", model, sites="all")[0]
    for n, t in gm.named_buffers():
        if n.endswith("D"):
            assert t.dtype == torch.float32 and torch.equal(t, double.get_buffer(n).float())


def test_the_last_linear_layer_trains_if_asked() -> None:
    gm, _ = insert("lora-c", train_head=True)
    assert {n for n, p in gm.named_parameters() if p.requires_grad} == {"7.A", "7.B", "11.weight", "11.bias"}


def test_shared_convs_share_one_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.relu(self.conv(x)))

    gm, log = insert("lora-edge", Twice())
    assert log == [Site("conv")] and sum(isinstance(m, FactorConv) for m in gm.modules()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_without_a_batch(kind: str) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Conv2d(8, 6, 3, padding="same", padding_mode="reflect"), nn.ReLU()).double()
    gm, _ = run_passes(source, [lora(kind)], X[0])
    assert torch.equal(gm(X[0].double()), source(X[0].double()))


def test_options_that_do_not_fit_are_the_users() -> None:
    with pytest.raises(FloorplanError, match="^rank 0: an adapter has a whole rank of 1 or more$"):
        insert("lora-c", rank=0)
    with pytest.raises(FloorplanError, match=r"^no conv was adapted \(7 looked at with --sites x --rank 2\)"):
        insert("lora-c", sites="x")


def test_golden() -> None:
    model = nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    golden(
        [lora("lora-c")],
        model,
        X,
        """\
input_1 = input()
_0 = LoraC(input_1)  trains A, B  saves input_1[2, 8, 6, 5], float64[6, 8, 3, 3]
_1 = BatchNorm2d(_0)  saves _0[2, 6, 4, 3]
_2 = ReLU(_1)  saves _2[2, 6, 4, 3]
output = output(_2)""",
    )
    golden(
        [lora("lora-c-official")],
        model,
        X,
        """\
input_1 = input()
_0 = LoraCOfficial(input_1)  trains A, B  saves input_1[2, 8, 6, 5], float64[6, 8, 3, 3]
_1 = BatchNorm2d(_0)  saves _0[2, 6, 4, 3]
_2 = ReLU(_1)  saves _2[2, 6, 4, 3]
output = output(_2)""",
    )
    golden(
        [lora("lora-conv")],
        model,
        X,
        """\
input_1 = input()
_0 = SideConv(input_1)  trains A, B  saves input_1[2, 8, 6, 5], float64[2, 2, 4, 3]
_1 = BatchNorm2d(_0)  saves _0[2, 6, 4, 3]
_2 = ReLU(_1)  saves _2[2, 6, 4, 3]
output = output(_2)""",
    )
    golden(
        [lora("lora-edge")],
        model,
        X,
        """\
input_1 = input()
_0 = FactorConv(input_1)  trains U  saves float64[2, 2, 4, 3]
_1 = BatchNorm2d(_0)  saves _0[2, 6, 4, 3]
_2 = ReLU(_1)  saves _2[2, 6, 4, 3]
output = output(_2)""",
    )
    golden(
        [lora("lora-fa")],
        model,
        X,
        """\
input_1 = input()
_0 = FactorConv(input_1)  trains U  saves float64[2, 2, 4, 3]
_1 = BatchNorm2d(_0)  saves _0[2, 6, 4, 3]
_2 = ReLU(_1)  saves _2[2, 6, 4, 3]
output = output(_2)""",
    )


def test_golden_refusals() -> None:
    def model() -> nn.Module:
        up = nn.ConvTranspose2d(8, 8, 2)
        return nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, (1, 3)), up)

    golden(
        [lora("lora-c", sites="all")],
        model(),
        X,
        """\
input_1 = input()
_0 = LoraC(input_1)  trains A, B  saves input_1[2, 8, 6, 5], float64[8, 8, 1, 1]
_1 = Conv2d(_0)  saves _0[2, 8, 6, 5]
_2 = LoraC(_1)  trains A, B  saves _1[2, 8, 6, 5], float64[8, 8, 1, 3]
_3 = ConvTranspose2d(_2)  saves _2[2, 8, 6, 3]
output = output(_3)
# 1: lora-c is defined for ungrouped 1-D and 2-D convs; frozen as it is
# 3: lora-c is defined for convs, not for transposed ones; frozen as it is""",
    )
    golden(
        [lora("lora-c-official", sites="all")],
        model(),
        X,
        """\
input_1 = input()
_0 = LoraCOfficial(input_1)  trains A, B  saves input_1[2, 8, 6, 5], float64[8, 8, 1, 1]
_1 = LoraCOfficial(_0)  trains A, B  saves _0[2, 8, 6, 5], float64[8, 4, 1, 1]
_2 = Conv2d(_1)  saves _1[2, 8, 6, 5]
_3 = ConvTranspose2d(_2)  saves _2[2, 8, 6, 3]
output = output(_3)
# 2: lora-c-official needs a square kernel; frozen as it is
# 3: lora-c-official is defined for convs, not for transposed ones; frozen as it is""",
    )
    golden(
        [lora("lora-conv", sites="0")],
        model(),
        X,
        """\
input_1 = input()
_0 = SideConv(input_1)  trains A, B  saves input_1[2, 8, 6, 5], float64[2, 2, 6, 5]
_1 = Conv2d(_0)  saves _0[2, 8, 6, 5]
_2 = Conv2d(_1)  saves _1[2, 8, 6, 5]
_3 = ConvTranspose2d(_2)  saves _2[2, 8, 6, 3]
output = output(_3)
# 1: not matched by --sites 0; frozen as it is
# 2: not matched by --sites 0; frozen as it is
# 3: not matched by --sites 0; frozen as it is""",
    )
