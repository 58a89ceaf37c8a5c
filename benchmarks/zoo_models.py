"""The models of the zoo: their names, how they are built, and sizes at which they run fast."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from floorplan.torch_doors import BatchNormNd

FAMILIES = ("torchvision", "timm", "examples")
MORE = "timm-more"
SIDE = 64  # of the images that are run for real; the smallest that most models accept

# Not convolutional: their blocks are attention.
TRANSFORMERS = ("vit_", "swin", "maxvit")

# Image sides that a model needs beyond SIDE: its pools shrink 64 pixels to nothing.
SIDES = {
    "inception_v3": 299,  # the auxiliary classifier's 5x5 conv has no padding
    "inception_v3:no_aux": 96,
    "alexnet": 96,
    "inception_v4": 96,
    "inception_resnet_v2": 96,
    "selecsls42b": 96,
    "nasnetalarge": 96,
    "pnasnet5large": 96,
}

TIMM = (
    "convmixer_768_32",
    "convnext_atto",
    "convnext_pico_ols",
    "cs3darknet_s",
    "cspresnet50",
    "cspresnext50",
    "darknet17",
    "darknet53",
    "densenet121",
    "dla34",
    "dla60_res2net",
    "dpn68",
    "eca_resnet33ts",
    "ecaresnet26t",
    "edgenext_xx_small",
    "efficientnet_b0",
    "efficientnet_lite0",
    "ese_vovnet19b_dw",
    "fastvit_t8",
    "fbnetc_100",
    "fbnetv3_b",
    "gernet_s",
    "ghostnet_100",
    "ghostnetv2_100",
    "ghostnetv3_050",
    "hardcorenas_a",
    "hgnet_tiny",
    "hgnetv2_b0",
    "hrnet_w18_small",
    "inception_resnet_v2",
    "inception_v4",
    "inception_next_atto",
    "lcnet_050",
    "legacy_seresnet18",
    "mixnet_s",
    "mnasnet_100",
    "mobilenetv2_100",
    "mobilenetv3_large_100",
    "mobilenetv4_conv_small",
    "mobileone_s0",
    "nf_resnet26",
    "nfnet_l0",
    "pnasnet5large",
    "regnetx_002",
    "regnety_002",
    "repghostnet_050",
    "repvgg_a0",
    "repvit_m0_9",
    "res2net50_14w_8s",
    "resnest14d",
    "resnet18",
    "resnet26d",
    "resnetblur50",
    "resnetv2_50",
    "resnetv2_50x1_bit",
    "resnext26ts",
    "resnext50_32x4d",
    "rexnet_100",
    "selecsls42b",
    "semnasnet_075",
    "seresnet33ts",
    "seresnext26t_32x4d",
    "skresnet18",
    "spnasnet_100",
    "starnet_s1",
    "tf_efficientnetv2_b0",
    "tinynet_e",
    "tresnet_m",
    "vgg11_bn",
    "vovnet39a",
    "xception41",
)

# The smallest of every family of timm that has convs, up to 60 M parameters; a page of their own (docs/zoo_timm.md).
TIMM_MORE = """
coat_lite_mini coat_lite_small coat_lite_tiny coat_mini coat_tiny convmixer_1024_20_ks9_p14 convmixer_1536_20
convnext_zepto_rms convnext_zepto_rms_ols cpubone_b0_bfrobust cpubone_b1_dwnorm cpubone_nano cpubone_s0
cpubone_t0 crossvit_15_240 crossvit_9_240 crossvit_9_dagger_240 crossvit_small_240 crossvit_tiny_240
cs3darknet_focus_m cs3darknet_focus_s cs3darknet_m csatv2 csatv2_21m cspnext_l cspnext_m cspnext_s
cspnext_tiny cspnext_x davit_small davit_tiny densenet161 densenet169 densenet201 densenetblur121d dla46_c
dla46x_c dla60_res2next dla60x_c dpn48b dpn68b dpn92 eca_botnext26ts_256 eca_halonext26ts edgenext_base
edgenext_small edgenext_small_rw edgenext_x_small efficientformer_l1 efficientformer_l3 efficientformerv2_l
efficientformerv2_s0 efficientformerv2_s1 efficientformerv2_s2 efficientvim_m1 efficientvim_m1_dist
efficientvim_m2 efficientvim_m2_dist efficientvim_m3 efficientvit_b0 efficientvit_b1 efficientvit_b2
efficientvit_b3 efficientvit_m0 efficientvit_m1 efficientvit_m2 efficientvit_m3 fasternet_s fasternet_t0
fasternet_t1 fasternet_t2 fastvit_mci0 fastvit_s12 fastvit_t12 focalnet_small_lrf focalnet_small_srf
focalnet_tiny_lrf focalnet_tiny_srf gcvit_small gcvit_tiny gcvit_xtiny gcvit_xxtiny ghostnet_050 halonet_h1
hardcorenas_b hardcorenas_c hardcorenas_d hgnetv2_b1 hgnetv2_b2 hrnet_w18 hrnet_w18_small_v2 hrnet_w18_ssld
iformer_m iformer_m_distilled iformer_s iformer_t inception_next_small inception_next_tiny inception_v3
lambda_resnet26rpt_256 lambda_resnet26t lcnet_035 lcnetv2_base lcnetv2_large lcnetv2_small legacy_seresnet34
legacy_seresnext26_32x4d legacy_seresnext50_32x4d levit_128 levit_128s levit_conv_128 levit_conv_128s
lowformer_b0 lowformer_b1 lowformer_e1 lowformer_e2 mambaout_femto mambaout_kobe mambaout_tiny
maxvit_pico_rw_256 maxvit_rmlp_pico_rw_256 mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035
mobileone_s1 mobileone_s2 mobilevit_xs mobilevit_xxs mobilevitv2_050 mobilevitv2_075 mvitv2_base mvitv2_small
mvitv2_small_cls mvitv2_tiny nest_small nest_small_jx nest_tiny nest_tiny_jx nextvit_base nextvit_large
nextvit_small nf_regnet_b0 nf_regnet_b1 nf_regnet_b2 pit_ti_224 pit_ti_distilled_224 pit_xs_224
pit_xs_distilled_224 poolformer_s12 poolformer_s24 poolformerv2_s12 poolformerv2_s24 pvt_v2_b0 pvt_v2_b1
pvt_v2_b2 pvt_v2_b2_li rdnet_small rdnet_tiny regnetx_004 regnety_004 repghostnet_058 repghostnet_080
repghostnet_100 repvit_m1 repvit_m1_0 repvit_m2 res2net50_26w_4s res2net50_48w_2s res2next50 resnest26d
resnest50d resnest50d_1s4x24d resnet10t resnet14t resnetv2_18 resnetv2_18d resnetv2_34 resnetv2_34d rexnet_130
rexnetr_100 rexnetr_130 selecsls42 selecsls60 selecsls60b sequencer2d_l sequencer2d_m sequencer2d_s shvit_s1
shvit_s2 shvit_s3 shvit_s4 skresnet34 skresnet50 skresnet50d starnet_s050 starnet_s100 starnet_s150
swiftformer_l1 swiftformer_l3 swiftformer_s swiftformer_xs test_byobnet test_coatnet test_convnext
test_convnext2 test_convnext3 test_efficientnet test_efficientnet_evos test_efficientnet_gn
test_efficientnet_ln test_mambaout test_maxvit test_nfnet test_resnet tiny_vit_11m_224 tiny_vit_21m_384
tiny_vit_21m_512 tiny_vit_5m_224 tresnet_l tresnet_v2_l twins_pcpvt_base twins_pcpvt_small twins_svt_base
twins_svt_small visformer_small visformer_tiny vit_small_r26_s32_224 vit_small_r26_s32_384
vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384
""".split()

EXAMPLES = ("t_resnet", "mobilenet_v2")


@dataclass(frozen=True)
class Sample:
    """A model to check; `shape` is a small input without its batch, `full` the usual one."""

    model: nn.Module
    shape: tuple[int, ...]
    full: tuple[int, ...]


def names(family: str) -> list[str]:
    """Models of one family; `name:no_aux` is the same model without its auxiliary classifier."""
    if family in ("timm", MORE):
        return list(TIMM if family == "timm" else TIMM_MORE)
    if family == "examples":
        return list(EXAMPLES)
    import torchvision

    listed = torchvision.models.list_models(module=torchvision.models)
    kept = [n for n in listed if not n.startswith(TRANSFORMERS)]
    return sorted([*kept, "googlenet:no_aux", "inception_v3:no_aux"])


def build(family: str, name: str) -> Sample:
    """A model with seeded weights and random BatchNorm statistics, and the shapes of its inputs."""
    torch.manual_seed(0)
    if family == "examples":
        model = _example(name)
        shape = cast(tuple[int, ...], cast(Any, model).example_input_shape)
        full = shape
    else:
        model = _torchvision(name) if family == "torchvision" else _timm(name)
        side = _side(model) if family == MORE else SIDES.get(name, SIDE)
        shape, full = (3, side, side), (3, max(side, 224), max(side, 224))
    randomize(model)
    return Sample(model, shape, full)


def _side(model: nn.Module) -> int:
    """The smallest image side that a model of timm takes, of a few."""
    config = cast(Any, model).pretrained_cfg
    for side in (SIDE, 96, 128, 192):
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(2, 3, side, side))
            model.train()
            return side
        except Exception:  # whatever it raises, it does not take this size
            continue
    model.train()
    return int(config["input_size"][-1])


def _torchvision(name: str) -> nn.Module:
    import torchvision

    base, _, no_aux = name.partition(":")
    options: dict[str, Any] = {}
    if base in ("googlenet", "inception_v3"):
        options = {"init_weights": False, "aux_logits": not no_aux}
    model: nn.Module = torchvision.models.get_model(base, weights=None, **options)
    return model


def _timm(name: str) -> nn.Module:
    import timm

    return cast(nn.Module, timm.create_model(name, pretrained=False))


def _example(name: str) -> nn.Module:
    path = Path(__file__).resolve().parent.parent / "examples" / "backbones.py"
    spec = importlib.util.spec_from_file_location("backbones", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(nn.Module, getattr(module, name)())


def randomize(model: nn.Module) -> None:
    """Random BatchNorm statistics and weights: fresh ones would make a comparison vacuous."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, BatchNormNd):
                spread = [(m.running_mean, -0.2, 0.2), (m.running_var, 0.5, 1.5)]
                for t, low, high in [*spread, (m.weight, 0.7, 1.3), (m.bias, -0.2, 0.2)]:
                    if t is not None:
                        t.uniform_(low, high, generator=g)
