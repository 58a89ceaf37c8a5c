"""The layers of the hard models: small nets of kinds that memory tools get wrong."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Conv, Norm = nn.Conv2d, nn.BatchNorm2d


class Lambda(nn.Module):
    """Named layers and a function that runs them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = [run]  # in a list, or fx would call it as the module's own method

    def forward(self, x: Tensor) -> Any:
        """Run the function on the layers."""
        return self.run[0](self, x)


def block(m: Any, x: Tensor) -> Tensor:
    """relu(bn(conv))"""
    return F.relu(m.b1(m.c1(x)))


def block2(m: Any, x: Tensor) -> Tensor:
    """Two of them."""
    return F.relu(m.b2(m.c2(block(m, x))))


def same(a: int, b: int, **options: Any) -> nn.Conv2d:
    """A 3x3 conv that keeps the size."""
    return Conv(a, b, 3, padding=1, **options)


def pair(width: int, norm: Any = Norm) -> dict[str, nn.Module]:
    """Layers of `block2`."""
    return {
        "c1": same(3, width, bias=False),
        "b1": norm(width),
        "c2": same(width, width, bias=False),
        "b2": norm(width),
    }


def added_in_place(m: Any, x: Tensor) -> Any:
    y = F.relu(m.c1(x), inplace=True)
    y += m.skip(x)
    return m.head(y)


def channel_shuffle(m: Any, x: Tensor) -> Any:
    a, b = m.c0(x).chunk(2, 1)
    y = torch.cat([a, F.relu(m.c1(b))], 1)
    n, c, h, w = y.shape
    y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return m.c2(y[:, : c // 4])


def value_branch(m: Any, x: Tensor) -> Any:
    y = F.relu(m.c1(x))
    if y.mean() > 0.1:
        y = F.relu(m.c2(y))
    return y.mean((2, 3))


def size_branch(m: Any, x: Tensor) -> Any:
    a, b = F.relu(m.hi(x)), F.relu(m.lo(x))
    if a.shape[-1] != b.shape[-1]:
        b = F.interpolate(b, size=a.shape[-2:], mode="nearest")
    return m.head(a + b)


def residual(m: Any, x: Tensor) -> Any:
    y = m.b2(m.c2(m.relu(m.b1(m.c1(x)))))
    y += m.down(x)
    return m.fc(torch.flatten(F.adaptive_avg_pool2d(m.relu(y), 1), 1))


def conv_lstm(m: Any, x: Tensor) -> Any:
    x = F.relu(m.c2(F.relu(m.c1(x.unsqueeze(1)))))
    return m.fc(m.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class Dense(nn.Module):
    """Every layer reads all maps before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.ModuleList(Norm(8 + 4 * i) for i in range(4))
        self.conv = nn.ModuleList(same(8 + 4 * i, 4, bias=False) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate, normalise, convolve."""
        maps = [x]
        for norm, conv in zip(self.norm, self.conv, strict=True):
            maps.append(conv(F.relu(norm(torch.cat(maps, 1)))))
        return torch.cat(maps, 1)


class FrozenNorm(nn.Module):
    """A hand-written BatchNorm with fixed statistics."""

    scale: Tensor
    shift: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width).view(1, -1, 1, 1))
        self.register_buffer("shift", torch.linspace(-0.2, 0.2, width).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x * scale + shift"""
        return x * self.scale + self.shift


def biased() -> Any:
    m = Lambda(lambda m, x: block(m, x).pow(2).mean((2, 3)), c1=same(3, 8), b1=Norm(8, eps=1e-3))
    m.c1.bias.data.copy_(torch.linspace(-5, 5, 8))
    m.b1.running_mean.copy_(torch.linspace(-4, 6, 8))
    return m


def bad_variance() -> Any:
    m = Lambda(block2, c1=same(3, 6), b1=Norm(6), c2=same(6, 6), b2=Norm(6))
    m.b1.running_var[0] = 0.0
    m.b2.running_var[2] = -m.b2.eps
    return m


def deconv() -> Any:
    up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False)
    m = Lambda(block, c1=up, b1=Norm(6))
    m.b1.running_var.copy_(torch.linspace(0.5, 3, 6))
    m.b1.running_mean.copy_(torch.linspace(-1, 1, 6))
    return m


def depthwise() -> nn.Module:
    return Lambda(
        lambda m, x: m.b2(m.proj(F.relu(m.b1(m.dw(F.relu(m.b0(m.pw(x)))))))),
        pw=Conv(3, 12, 1, bias=False),
        b0=Norm(12),
        b1=Norm(12),
        b2=Norm(4),
        dw=same(12, 12, groups=12, bias=False),
        proj=Conv(12, 4, 1, bias=False),
    )


def geometry() -> nn.Module:
    options: dict[str, Any] = {"stride": (2, 1), "padding": (1, 4), "dilation": (1, 2)}
    return Lambda(
        lambda m, x: F.relu(m.b2(m.c2(F.relu(m.c1(x))))),
        c1=Conv(3, 6, 3, padding=2, dilation=2, padding_mode="reflect"),
        c2=Conv(6, 6, (3, 5), padding_mode="circular", **options),
        b2=Norm(6),
    )


def sensors() -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        return m.fc(m.pool(block2(m, x)).flatten(1))

    return Lambda(
        run,
        c1=nn.Conv1d(9, 16, 9, stride=2, padding=4, bias=False),
        b1=nn.BatchNorm1d(16),
        c2=nn.Conv1d(16, 32, 5, padding=2, bias=False),
        b2=nn.BatchNorm1d(32),
        pool=nn.MaxPool1d(2),
        fc=nn.Linear(1024, 6),
    )


def checkpointed() -> nn.Module:
    inner = nn.Sequential(same(8, 8, bias=False), Norm(8), nn.ReLU(), Conv(8, 8, 1))
    return Lambda(
        lambda m, x: checkpoint(m.inner, F.relu(m.stem(x)), use_reentrant=False).mean((2, 3)),
        stem=same(3, 8),
        inner=inner,
    )


def spectral() -> nn.Module:
    c2 = nn.utils.parametrizations.spectral_norm(same(6, 6))
    return Lambda(lambda m, x: F.relu(m.c2(F.relu(m.c1(x)))), c1=same(3, 6), c2=c2)


def project() -> nn.Module:
    down = nn.Sequential(Conv(8, 16, 1, stride=2, bias=False), Norm(16))
    return Lambda(
        residual,
        c1=Conv(8, 16, 3, stride=2, padding=1, bias=False),
        b1=Norm(16),
        c2=same(16, 16, bias=False),
        b2=Norm(16),
        down=down,
        relu=nn.ReLU(inplace=True),
        fc=nn.Linear(16, 3),
    )


def looped(m: Any, x: Tensor) -> Tensor:
    for _ in range(5):
        x = F.relu(m.conv(x))
    return x


def two_heads(m: Any, x: Tensor) -> Any:
    """A main and an auxiliary head."""
    y = block(m, x)
    return OrderedDict(out=m.head(F.relu(m.c2(y))), aux=m.aux(y))


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x)"""
    return x * torch.sigmoid(x)
