"""The models of the zoo: their names, how they are built, and sizes at which they run fast."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from floorplan.torch_doors import BatchNormNd

FAMILIES = ("torchvision", "timm", "examples")
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

EXAMPLES = ("t_resnet", "mobilenet_v2")


@dataclass(frozen=True)
class Sample:
    """A model to check; `shape` is a small input without its batch, `full` the usual one."""

    model: nn.Module
    shape: tuple[int, ...]
    full: tuple[int, ...]


def names(family: str) -> list[str]:
    """Models of one family; `name:no_aux` is the same model without its auxiliary classifier."""
    if family == "timm":
        return list(TIMM)
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
        side = SIDES.get(name, SIDE)
        shape, full = (3, side, side), (3, max(side, 224), max(side, 224))
    randomize(model)
    return Sample(model, shape, full)


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
