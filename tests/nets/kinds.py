"""Kinds of layers and tricks beside the hard models, each as (model, inputs)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hard_nets import Conv, Lambda, Norm, block, block2, pair, same
from torch import Tensor, nn

Kind = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def images(*shape: int) -> Tensor:
    """A batch of four 3-channel images, or of the given shape."""
    return torch.randn(shape or (4, 3, 12, 12))


def of(run: Callable[..., Any], *inputs: Tensor, **layers: nn.Module) -> Kind:
    """A kind made of named layers and a function that runs them on one input."""
    return lambda: (Lambda(run, **layers), inputs or (images(),))


class Hiding(torch.autograd.Function):
    """Keeps its input where hooks do not look."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        """2x"""
        ctx.hidden = x.clone()
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """2g"""
        return g * 2 + 0 * ctx.hidden


class Bytes(torch.autograd.Function):
    """Keeps a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        """2x"""
        ctx.save_for_backward((x * 255).to(torch.uint8))
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """g times the bytes"""
        (kept,) = ctx.saved_tensors
        return g * kept


class Apply(nn.Module):
    """A custom function as a module, so that only this is opaque."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.function[0].apply(x)  # type: ignore[no-any-return]


class Remember(nn.Module):
    """Puts every input aside on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """2x"""
        self.last = x
        return x * 2


@dataclass
class Output:
    """What some models return."""

    maps: Tensor
    count: int = 3


class Several(nn.Module):
    """Inputs of different sizes, one of them optional."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = same(3, 8), same(5, 8), nn.Linear(7, 8)

    def forward(self, x: Tensor, y: Tensor, z: Tensor, mask: Tensor | None = None) -> Any:
        """Sum of the three."""
        maps = F.relu(self.a(x)).mean((2, 3)) + F.relu(self.b(y)).mean((2, 3)) + self.fc(z)
        return maps if mask is None else maps * mask


def _add_to_a_view(m: Any, x: Tensor) -> Any:
    y = m.c1(x)
    y[:, :4] += m.c2(x)
    return m.c3(y)


def _unpool(m: Any, x: Tensor) -> Any:
    y, where = m.pool(F.relu(m.c1(x)))
    return m.c2(m.unpool(y, where))


def _attention(m: Any, x: Tensor) -> Any:
    q, k, v = (layer(x).flatten(2) for layer in (m.q, m.k, m.v))
    scores = torch.einsum("bcn,bcm->bnm", q, k).softmax(-1)
    return torch.einsum("bnm,bcm->bcn", scores, v)


def _warped(m: Any, x: Tensor) -> Any:
    grid = m.g(x).permute(0, 2, 3, 1).tanh()
    return m.c2(F.grid_sample(F.relu(m.c1(x)), grid, align_corners=False))


def _through(layer: Callable[..., Any], width: int = 8, out: int = 8) -> Kind:
    """conv, ReLU, `layer`, conv"""
    return of(lambda m, x: m.c2(layer(F.relu(m.c1(x)))), c1=same(3, width), c2=same(out, 4))


def _excite(m: Any, x: Tensor) -> Any:
    y = F.relu(m.c1(x))
    return y * torch.sigmoid(m.f(y.mean((2, 3), keepdim=True)))


def _recurrent(cell: Callable[..., nn.Module], *options: Any, **more: Any) -> Kind:
    def run(m: Any, x: Tensor) -> Any:
        return m.cell(F.relu(m.c1(x)).permute(2, 0, 1))[0]

    return of(run, images(4, 3, 5), c1=nn.Conv1d(3, 8, 3), cell=cell(8, 5, *options, **more))


def _last(function: Callable[[Tensor], Any], width: int = 8) -> Kind:
    """A function of the last conv's result."""
    return of(lambda m, x: function(m.c1(x)), c1=same(3, width))


FLOOR: dict[str, Kind] = {
    "relu6": of(lambda m, x: F.relu6(m.b1(m.c1(x))), c1=same(3, 8), b1=Norm(8)),
    "hardtanh": of(lambda m, x: F.hardtanh(m.c1(x), -0.5, 0.7), c1=same(3, 8)),
    "pixel-shuffle": _through(nn.PixelShuffle(2), 16, 4),
    "channel-shuffle": _through(nn.ChannelShuffle(4), 16, 16),
    "overlapping-pool": _through(nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    "odd-adaptive-pool": _through(nn.AdaptiveAvgPool2d((5, 3))),
    "nearest": _through(lambda x: F.interpolate(x, scale_factor=2)),
    "bilinear": _through(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "bicubic": _through(lambda x: F.interpolate(x, size=(9, 7), mode="bicubic")),
    "cropped-by-shape": _through(lambda x: x[:, :, : x.shape[2] // 2, 1:]),
    "unbind": _through(lambda x: torch.stack(x.unbind(1), 1)),
    "expand": _through(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 6, 6)),
    "pad-with-a-value": of(lambda m, x: m.c1(F.pad(x, (1, 1, 1, 1), value=0.5)), c1=Conv(3, 8, 3)),
    "two-norms-one-conv": of(
        lambda m, x: F.relu(m.b1(m.c1(x))) + F.relu(m.b2(m.c1(x))), c1=same(3, 8), b1=Norm(8), b2=Norm(8)
    ),
    "add-to-a-view": of(_add_to_a_view, c1=same(3, 8), c2=same(3, 4), c3=same(8, 4)),
    "no-affine": of(block2, **pair(8, lambda c: Norm(c, affine=False))),
    "cumulative-statistics": of(block2, **pair(8, lambda c: Norm(c, momentum=None))),
    "nested-output": of(lambda m, x: {"a": [m.c1(x), (x.shape[0], None)]}, c1=same(3, 8)),
    "dataclass-output": of(lambda m, x: Output(m.c1(x)), c1=same(3, 8)),
    "several-inputs": lambda: (Several(), (images(), images(4, 5, 6, 9), images(4, 7))),
    "one-channel-dropout": of(
        lambda m, x: m.c2(F.dropout1d(F.relu(m.c1(x)), 0.2, m.training)),
        images(4, 3, 20),
        c1=nn.Conv1d(3, 8, 3),
        c2=nn.Conv1d(8, 4, 1),
    ),
    "deconv-3d": of(block, images(2, 6, 4, 5, 6), c1=nn.ConvTranspose3d(6, 8, 3, 2, 1), b1=nn.BatchNorm3d(8)),
    "one-position": of(block2, images(4, 3, 1, 1), **pair(8)),
    "batch-of-one": of(block2, images(1, 3, 12, 12), **pair(8)),
    "input-with-gradient": of(block2, images().requires_grad_(), **pair(8)),
    "strided-input": of(block2, images(4, 6, 12, 12)[:, ::2], **pair(8)),
    "bfloat16": lambda: (Lambda(block2, **pair(8)).bfloat16(), (images().bfloat16(),)),
    "float64": lambda: (Lambda(block2, **pair(8)).double(), (images().double(),)),
}

ABOVE: dict[str, Kind] = {
    "selu": _last(F.selu),
    "unpool": of(
        _unpool, c1=same(3, 8), c2=same(8, 4), unpool=nn.MaxUnpool2d(2), pool=nn.MaxPool2d(2, return_indices=True)
    ),
    "attention": of(_attention, q=Conv(3, 8, 1), k=Conv(3, 8, 1), v=Conv(3, 8, 1)),
    "grid-sample": of(_warped, c1=same(3, 8), g=same(3, 2), c2=same(8, 4)),
    "squeeze-excite": of(_excite, c1=same(3, 8), f=Conv(8, 8, 1)),
    "width-as-a-number": _last(lambda y: y.view(-1, 24, 144).sigmoid().sum(1), 24),
    "int64-map": _last(lambda y: y.gather(1, y.argsort(1))),
    "bool-mask": _last(lambda y: y.masked_fill(y < 0, 0.0)),
    "where": _last(lambda y: torch.where(y > 0, y, 0.1 * y)),
    "hidden-on-ctx": of(lambda m, x: m.h(m.c1(x)), c1=same(3, 8), h=Apply(Hiding)),
    "bytes-of-the-users-own": of(lambda m, x: m.h(m.c1(x)), c1=same(3, 8), h=Apply(Bytes)),
    "one-channel": _last(torch.sigmoid, 1),
    "as-wide-as-the-rank": _last(torch.sigmoid, 2),
    "as-wide-as-the-batch": _last(torch.sigmoid, 4),
    "as-wide-as-high": _last(torch.sigmoid, 12),
    "as-wide-as-a-hint": _last(torch.sigmoid, 11),
    "rank-many-channels": _last(lambda y: y[:, :2].sigmoid()),
    "no-channels": _last(lambda y: y.mean(1).sigmoid()),
    "no-batch": _last(lambda y: y.mean(0).sigmoid()),
    "batch-as-a-number": _last(lambda y: y.sigmoid().reshape(4, -1).sum(1)),
    "all-as-numbers": _last(lambda y: y.sum(1).reshape(4, 144).sigmoid()),
    "upcast": _last(lambda y: (y.double() ** 2).float()),
    "complex": _last(lambda y: torch.fft.rfft2(y).abs()),
    "layer-norm": of(lambda m, x: m.n(m.c1(x)), c1=same(3, 8), n=nn.LayerNorm([8, 12, 12])),
    "group-norm": of(lambda m, x: m.n(m.c1(x)), c1=same(3, 8), n=nn.GroupNorm(1, 8)),
    "instance-norm": of(lambda m, x: m.n(m.c1(x)), c1=same(3, 8), n=nn.InstanceNorm2d(8)),
    "weight-norm": of(
        lambda m, x: m.c2(F.relu(m.c1(x))), c1=same(3, 8), c2=nn.utils.parametrizations.weight_norm(same(8, 8))
    ),
    "lstm": _recurrent(nn.LSTM, 2, bidirectional=True, dropout=0.3),
    "lstm-without-bias": _recurrent(nn.LSTM, bias=False),
    "gru": _recurrent(nn.GRU),
    "rnn": _recurrent(nn.RNN),
}
