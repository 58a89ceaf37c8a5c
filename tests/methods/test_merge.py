"""Merged models against adapted ones in float64, their files, and what is refused."""

import copy
from typing import Any

import hard_models
import hard_nets as nets
import kinds
import pytest
import torch
import torch.nn.functional as F
from convs import GEOMETRIES
from hard_nets import Conv, Lambda, Norm, same
from merges import X, adapted, check, into_source, kinds_in
from small import Residual
from torch import nn

from floorplan.errors import FloorplanError
from floorplan.layers.adapter import Adapter, adapters
from floorplan.layers.fused import FusedConv
from floorplan.methods.catalogue import METHODS
from floorplan.methods.merge import difference, merge, merge_verified
from floorplan.methods.merge_file import delta_state

MERGEABLE = [m.name for m in METHODS.values() if m.merges and m.name not in ("full", "bias", "bn")]
NO_SOURCE = ("memflora-noscale",)  # the scale that its source would need is gone


@pytest.mark.parametrize("conv,shape", GEOMETRIES, ids=lambda v: str(v))
def test_every_geometry(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    nd = len(shape) - 1
    bn = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][nd - 1](conv.out_channels)
    x = torch.randn(3, *shape)
    for act in (nn.ReLU6(), nn.LeakyReLU(0.2, inplace=True)):
        model = nn.Sequential(copy.deepcopy(conv), copy.deepcopy(bn), act)
        gm, merged = check(model, x, rank=1)
        assert into_source(model, gm, x) <= 1e-12
        pads = conv.padding == "same" and any(
            d * (k - 1) % 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)
        )
        names = ["pad"] * pads + [type(conv).__name__, type(act).__name__]
        assert kinds_in(merged) == names
        new: Any = merged.get_submodule("0")
        if not pads and conv.padding == "same":
            assert new.padding_mode == conv.padding_mode
        assert (new.stride, new.dilation, new.groups) == (conv.stride, conv.dilation, conv.groups)
        assert not any(getattr(m, "inplace", False) for m in merged.modules())
    unbatched = check(copy.deepcopy(conv), x, rank=1)[1]
    assert difference(adapted(conv.double(), x.double(), rank=1), unbatched, (x[0].double(),)) <= 1e-12


@pytest.mark.parametrize("method", MERGEABLE)
def test_every_method(method: str) -> None:
    model = Residual()
    gm, merged = check(model, X, method=method)
    assert not [m for m in merged.modules() if isinstance(m, Adapter)]
    assert all(p.requires_grad for p in merged.parameters()) and not merged.training
    if method in NO_SOURCE:
        with pytest.raises(FloorplanError, match="none fits memflora-noscale"):
            delta_state(gm, model)
    else:
        assert into_source(model, gm, X) <= 1e-12
    single = adapted(Residual(), X, method=method)
    found = merge_verified(single, (X,))
    assert found.exact is not None and found.exact <= 1e-12 and 0 < found.rounded <= 1e-5
    assert found.convs == len(adapters(single)) > 0


@pytest.mark.parametrize("method", MERGEABLE)
def test_every_method_on_other_shapes(method: str) -> None:
    grouped = nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)),
        Conv(3, 8, 3, 2),
        Norm(8),
        nn.ReLU(),
        Norm(8),
        Conv(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        Conv(8, 8, 3, groups=8),
        Conv(8, 4, 1, bias=False),
        Norm(4),
        Conv(4, 4, 2, padding="same"),
    )
    gm = check(grouped, X, method=method, sites="ungrouped")[0]
    if method not in NO_SOURCE:
        assert into_source(grouped, gm, X) <= 1e-12
    sensors = nets.sensors()
    gm = check(sensors, torch.randn(2, 9, 128), method=method)[0]
    if method not in NO_SOURCE:
        assert into_source(sensors, gm, torch.randn(2, 9, 128)) <= 1e-12


WHOLE = [
    "one-conv-in-a-loop",
    "grouped-deconv",
    "depthwise",
    "zero-and-negative-variance",
    "in-place-add-after-relu",
    "training-flag",
    "handwritten-frozen-norm",
]


@pytest.mark.parametrize("name", WHOLE)
def test_hard_models(name: str) -> None:
    hard = hard_models.HARD[name]
    model: Any = hard.build()
    x = torch.randn(*hard.input)
    if name == "zero-and-negative-variance":
        model.b2.running_var[2] = 0.5  # -eps gives infinity: nothing could be compared
    state = {k: t.clone() for k, t in model.state_dict().items()}
    model = model.double()
    gm = adapted(model, x.double(), rank=1)
    assert difference(gm, merge(gm), (x.double(),)) <= 1e-12 and set(state) == set(model.state_dict())
    if name != "handwritten-frozen-norm":
        assert into_source(model, gm, x) <= 1e-12


@pytest.mark.parametrize(
    "name",
    [
        "relu6",
        "hardtanh",
        "pad-with-a-value",
        "two-norms-one-conv",
        "add-to-a-view",
        "no-affine",
        "nested-output",
        "dataclass-output",
        "several-inputs",
        "one-channel-dropout",
        "deconv-3d",
        "one-position",
        "squeeze-excite",
        "weight-norm",
        "group-norm",
    ],
)
def test_kinds(name: str) -> None:
    model, inputs = copy.deepcopy((kinds.FLOOR | kinds.ABOVE)[name]())  # other tests share its layers
    gm = check(model, *inputs)[0]
    assert into_source(model, gm, *inputs) <= 1e-12


def test_the_residual_add_and_the_activation_are_nodes() -> None:
    model = Lambda(lambda m, x: F.relu(m.b(m.c(x)) + m.skip(x)), c=same(3, 6), b=Norm(6), skip=Conv(3, 6, 1))
    gm, merged = check(model, X)
    assert [type(m) for m in gm.children()] == [FusedConv, FusedConv]
    assert kinds_in(merged) == ["Conv2d", "Conv2d", "add", "ReLU"]
    kept = merged.meta["floorplan"]
    assert kept == {"merged": True, "method": "memflora", "input": [[2, 3, 12, 12]]}
    assert gm.meta["floorplan"] == {k: v for k, v in kept.items() if k != "merged"}


def test_calls_of_one_conv_stay_calls_of_one_conv() -> None:
    looped = Lambda(nets.looped, conv=same(8, 8))
    x = torch.randn(2, 8, 6, 6)
    for method in ("memflora", "memflora-kernel-down"):
        gm, merged = check(looped, x, method=method)
        convs = [n.target for n in merged.graph.nodes if "Conv" in str(n.target) or n.target == "conv"]
        assert convs == ["conv"] * 5 and len(list(merged.parameters())) == 2
        assert into_source(looped, gm, x) <= 1e-12
    single = adapted(Lambda(nets.looped, conv=same(8, 8)), x)
    assert len(list(merge_verified(single, (x,)).module.parameters())) == 2


def test_calls_of_one_conv_with_other_paddings_share_its_weight() -> None:
    model = Lambda(lambda m, x: m.c(F.pad(x, (1, 2, 1, 1))).mean() + m.c(x), c=Conv(3, 6, 3))
    merged = check(model, X)[1]
    convs = [m for m in merged.modules() if isinstance(m, Conv)]
    assert len(convs) == 2 and convs[0].weight is convs[1].weight and convs[0].bias is convs[1].bias


def test_a_scale_and_shift_is_a_batch_norm_that_train_does_not_change() -> None:
    for nd, norm in enumerate((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 1):
        conv: Any = [nn.Conv1d, nn.Conv2d, nn.Conv3d][nd - 1]
        model = nn.Sequential(norm(3), conv(3, 6, 1))
        x = torch.randn(2, 3, *[4] * nd)
        for method in ("memflora", "memflora-paper"):
            model.add_module("2", norm(6))
            merged = check(model, x, method=method)[1]
            assert kinds_in(merged) == ["batch_norm", "Conv" + f"{nd}d"]
            outputs = [merged.train(mode)(x.double()) for mode in (True, False)]
            assert torch.equal(*outputs)


def test_a_clamp_is_torch_clamp() -> None:
    merged = check(Lambda(lambda m, x: m.c(x).clamp(-0.1, 0.2), c=same(3, 6)), X)[1]
    assert kinds_in(merged) == ["Conv2d", "clamp"]


def test_channels_last_and_half_precision_stay() -> None:
    model: Any = nn.Sequential(same(3, 8), Norm(8), nn.ReLU(), same(8, 8))
    last = model.to(memory_format=torch.channels_last)
    merged = merge(adapted(last, X))
    assert all(
        m.weight.is_contiguous(memory_format=torch.channels_last) for m in merged.modules() if isinstance(m, Conv)
    )
    half = copy.deepcopy(model).bfloat16()
    found = merge_verified(adapted(half, X.bfloat16()), (X.bfloat16(),))
    assert {p.dtype for p in found.module.parameters()} == {torch.bfloat16}


def test_a_fault_in_a_merged_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = adapted(Residual(), X)
    value = FusedConv.value
    monkeypatch.setattr(FusedConv, "value", lambda site, x, w, b: value(site, x, w * 1.001, b))
    with pytest.raises(FloorplanError, match="outputs differ by"):
        merge_verified(gm, (X,))


@pytest.mark.parametrize("method", ["zero-shot", "full", "bias", "bn"])
def test_methods_without_adapters_are_plain_already(method: str) -> None:
    gm = adapted(Residual(), X, method=method)
    with pytest.raises(FloorplanError, match=f"method {method}: is plain already: nothing to merge"):
        merge(gm)


def test_other_refusals_name_layer_and_method() -> None:
    with pytest.raises(FloorplanError, match="Residual is no adapted graph"):
        merge(Residual())  # type: ignore[arg-type]
    gm = adapted(Residual(), X, method="memflora-bnr")
    with pytest.raises(
        FloorplanError, match="memflora-bnr: stem_branch is a RankBranch, which has a BatchNorm of q that"
    ):
        merge(gm)

    class Unknown(Adapter):
        rank = 2

    gm = adapted(Residual(), X)
    gm.add_submodule("odd", Unknown())
    with pytest.raises(FloorplanError, match="method memflora: odd is a Unknown, which has no place"):
        merge(gm)


@pytest.mark.parametrize("method", ["tinytl", "tinytl-trainbn"])
def test_lite_residuals_are_refused(method: str) -> None:
    if method not in METHODS:
        pytest.skip("not a method here")
    block = nn.Sequential(same(8, 8), Norm(8), nn.ReLU(), same(8, 8), Norm(8))
    gm = adapted(nn.Sequential(same(3, 8), block), X, method=method)
    with pytest.raises(FloorplanError, match=f"method {method}: .* is a LiteResidual"):
        merge(gm)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, torch.optim.swa_utils.AveragedModel])
def test_wrappers_are_opened_as_a_files_are(wrap: Any) -> None:
    gm = adapted(Residual(), X)
    for wrapped in (wrap(gm), nn.DataParallel(wrap(gm))):
        merged = merge(wrapped)
        assert not [m for m in merged.modules() if isinstance(m, FusedConv)]
        assert difference(merged, merge(gm), (X,)) == 0
