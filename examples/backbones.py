"""The two backbones of the MemFLoRA paper, for sensor windows of 97 channels and 60 samples.

    t_resnet      [B, 97, 60]     560,915 parameters: three residual blocks of (k,1) convs
    mobilenet_v2  [B, 1, 97, 60]  2,245,649 parameters: width 1.0, its window repeated to RGB

Name them on the command line as `examples/backbones.py:t_resnet`. No weights are downloaded: both
are initialised as PyTorch initialises their layers, from a seed.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

M = TypeVar("M", bound=nn.Module)


def _seeded(build: Callable[[], M], seed: int) -> M:
    """Build a module from a seed, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


class SameConv(nn.Module):
    """A (k,1) conv on a copy padded by k-1 samples, split left and right; then BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        before = (kernel - 1) // 2
        self.pad = (0, 0, before, kernel - 1 - before)
        self.conv = nn.Conv2d(inputs, outputs, (kernel, 1), bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, T, 1] -> [B, outputs, T, 1]."""
        out: Tensor = self.bn(self.conv(F.pad(x, self.pad)))
        return out


class TemporalBlock(nn.Module):
    """Convs of 8, 5 and 3 samples beside a shortcut: 1x1 conv and BatchNorm, or BatchNorm alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pre_bn = nn.BatchNorm2d(inputs)
        self.conv1 = SameConv(inputs, outputs, 8)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = SameConv(outputs, outputs, 5)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = SameConv(outputs, outputs, 3)
        widen = [] if inputs == outputs else [nn.Conv2d(inputs, outputs, 1, bias=False)]
        self.shortcut = nn.Sequential(*widen, nn.BatchNorm2d(outputs))
        self.relu3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, T, 1] -> [B, outputs, T, 1]."""
        s = self.shortcut(x)
        z = self.relu1(self.conv1(self.pre_bn(x)))
        z = self.conv3(self.relu2(self.conv2(z)))
        out: Tensor = self.relu3(z + s)
        return out


class TResNet(nn.Module):
    """Temporal ResNet: widths 64, 128, 128, global average pooling, one linear layer."""

    example_input_shape = (97, 60)

    def __init__(self, channels: int = 97, classes: int = 17, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            TemporalBlock(channels, width), TemporalBlock(width, 2 * width), TemporalBlock(2 * width, 2 * width)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, T] -> [B, classes]."""
        logits: Tensor = self.head(torch.flatten(self.pool(self.blocks(x.unsqueeze(-1))), 1))
        return logits


def _conv_bn_relu6(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """1x1 expansion (left out at factor 1), depthwise 3x3, linear 1x1 projection."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([_conv_bn_relu6(inputs, hidden, 1, 1, 1)] if expand != 1 else []),
            _conv_bn_relu6(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H/stride, W/stride], rounded up."""
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """MobileNetV2 at width 1.0, with torchvision's parameter names, for one-channel images."""

    example_input_shape = (1, 97, 60)
    stages = (  # expansion, width, blocks, stride of the first
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 17, dropout: float = 0.0) -> None:
        super().__init__()
        inputs = 32
        features: list[nn.Module] = [_conv_bn_relu6(3, inputs, 3, 2, 1)]
        for expand, width, blocks, stride in self.stages:
            for i in range(blocks):
                features.append(InvertedResidual(inputs, width, 1 if i else stride, expand))
                inputs = width
        features.append(_conv_bn_relu6(inputs, 1280, 1, 1, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1, H, W] -> [B, classes]; the window is repeated to the stem's three channels."""
        x = self.features(x.repeat(1, 3, 1, 1))
        x = torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)
        logits: Tensor = self.classifier(x)
        return logits


def t_resnet(channels: int = 97, classes: int = 17, seed: int = 0) -> TResNet:
    """The temporal ResNet, in train mode; equal seeds give equal weights."""
    return _seeded(lambda: TResNet(channels, classes), seed)


def mobilenet_v2(classes: int = 17, dropout: float = 0.0, seed: int = 0) -> MobileNetV2:
    """MobileNetV2 for [B, 1, 97, 60], in train mode; equal seeds give equal weights."""
    return _seeded(lambda: MobileNetV2(classes, dropout), seed)
