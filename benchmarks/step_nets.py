"""The nets of the step benchmark: how each is made, on what batch, and where checkpoints can cut it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RANK = 2


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function's value."""
        return self.function(x)


@dataclass(frozen=True)
class Net:
    """A model (its factory as the command line takes it), one step's batch, and MemFLoRA's sites.

    parts: the model as modules that run one after another; its blocks, then what follows the last one.
    checked: samples of the float64 check, and what part sizes are divided by in it.
    """

    title: str
    factory: str
    shape: tuple[int, ...]
    batch: int
    classes: int
    sites: str
    parts: Callable[[Any], list[nn.Module]]
    blocks: int
    checked: tuple[int, int]

    @property
    def missing(self) -> str:
        """Why the net cannot be made here; "" if it can."""
        no_zoo = "torchvision" in self.title and importlib.util.find_spec("torchvision") is None
        return "torchvision is not installed" if no_zoo else ""

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        """A random batch and its class numbers, the same on every call."""
        g = torch.Generator().manual_seed(0)
        x = torch.randn(count, *self.shape, generator=g)
        return x, torch.randint(0, self.classes, (count,), generator=g)


def mobilenet_v2_224() -> nn.Module:
    """torchvision's MobileNetV2, from a seed."""
    from torchvision.models import mobilenet_v2

    return _seeded(mobilenet_v2)


def resnet50() -> nn.Module:
    """torchvision's ResNet-50, from a seed."""
    from torchvision.models import resnet50 as build

    return _seeded(build)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return build()


def randomise_norms(model: nn.Module) -> nn.Module:
    """Random BatchNorm statistics and affine: with fresh ones ReLU6's upper clamp is never reached."""
    g = torch.Generator().manual_seed(1)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            assert m.running_mean is not None and m.running_var is not None
            m.running_mean.normal_(0.0, 0.3, generator=g)
            m.running_var.uniform_(0.5, 2.0, generator=g)
            m.weight.data.uniform_(0.5, 1.5, generator=g)
            m.bias.data.normal_(0.0, 0.5, generator=g)
    return model


def _pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def _t_resnet(m: Any) -> list[nn.Module]:
    head = nn.Sequential(Call(_pooled), m.head)
    return [nn.Sequential(Call(lambda x: x.unsqueeze(-1)), m.blocks[0]), *m.blocks[1:], head]


def _repeated(m: Any) -> list[nn.Module]:
    first, *rest = _mobilenet(m)
    return [nn.Sequential(Call(lambda x: x.repeat(1, 3, 1, 1)), first), *rest]


def _mobilenet(m: Any) -> list[nn.Module]:
    return [*m.features, nn.Sequential(Call(_pooled), m.classifier)]


def _resnet(m: Any) -> list[nn.Module]:
    stem = nn.Sequential(m.conv1, m.bn1, m.relu, m.maxpool)
    blocks = [b for layer in (m.layer1, m.layer2, m.layer3, m.layer4) for b in layer]
    return [stem, *blocks, nn.Sequential(Call(_pooled), m.fc)]


NETS = {
    "mobilenet_v2": Net(
        "MobileNetV2 97x60, B=64", "backbones:mobilenet_v2", (1, 97, 60), 64, 17, "auto", _repeated, 19, (9, 8)
    ),
    "mobilenet_v2_224": Net(
        "MobileNetV2 224x224 (torchvision), B=8",
        "step_nets:mobilenet_v2_224",
        (3, 224, 224),
        8,
        1000,
        "auto",
        _mobilenet,
        19,
        (3, 2),
    ),
    "resnet50": Net(
        "ResNet-50 224x224 (torchvision), B=8", "step_nets:resnet50", (3, 224, 224), 8, 1000, "all", _resnet, 17, (3, 2)
    ),
    "t_resnet": Net("T-ResNet 97x60, B=64", "backbones:t_resnet", (97, 60), 64, 17, "all", _t_resnet, 3, (9, 8)),
}
