"""Six small nets that no rewrite brings to the floor: smooth activations, squeeze-excite, normalization, gates."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Source, subject_of
from floorplan.methods.verify import randomize_adapters


def randomized(net: nn.Module, seed: int = 0) -> nn.Module:
    """Random BatchNorm statistics and affine, so that nothing is at its fresh value."""
    g = torch.Generator().manual_seed(seed)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.copy_(torch.randn(m.num_features, generator=g) * 0.2)
            m.running_var.copy_(torch.rand(m.num_features, generator=g) + 0.5)
            m.weight.data.copy_(torch.rand(m.num_features, generator=g) + 0.5)
            m.bias.data.copy_(torch.randn(m.num_features, generator=g) * 0.2)
    return net.eval()


class SqueezeExcite(nn.Module):
    def __init__(self, c: int, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.pool, self.act, self.gate = nn.AdaptiveAvgPool2d(1), act(), gate()
        self.down, self.up = nn.Conv2d(c, max(c // 4, 4), 1), nn.Conv2d(max(c // 4, 4), c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.act(self.down(self.pool(x)))))  # type: ignore[no-any-return]


class MBConv(nn.Module):
    def __init__(self, i: int, o: int, stride: int, act: type[nn.Module], gate: type[nn.Module], k: int = 3) -> None:
        super().__init__()
        h = 4 * i
        self.expand = nn.Sequential(nn.Conv2d(i, h, 1, bias=False), nn.BatchNorm2d(h), act())
        depthwise = nn.Conv2d(h, h, k, stride, k // 2, groups=h, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(h), act())
        self.se = SqueezeExcite(h, act if act is nn.SiLU else nn.ReLU, gate)
        self.project = nn.Sequential(nn.Conv2d(h, o, 1, bias=False), nn.BatchNorm2d(o))
        self.residual = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.se(self.depthwise(self.expand(x))))
        return x + y if self.residual else y  # type: ignore[no-any-return]


def _mobile(act: type[nn.Module], gate: type[nn.Module]) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), act())
    blocks = [(8, 8, 1), (8, 16, 2)]
    body = [MBConv(i, o, s, act, gate) for i, o, s in blocks]
    head = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), act())
    return nn.Sequential(stem, *body, head, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class NextBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.up, self.act, self.down = nn.Conv2d(c, 4 * c, 1), nn.GELU(), nn.Conv2d(4 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.down(self.act(self.up(y)))  # type: ignore[no-any-return]


class GatedBlock(nn.Module):
    """An attention-like product: what passes is decided by a softmax over positions and by a sigmoid."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Conv2d(c, c, 1) for _ in range(3))
        self.key = nn.Conv2d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.value(x) * torch.sigmoid(self.gate(x))
        weights = self.key(x).flatten(2).softmax(-1)
        context = torch.matmul(v.flatten(2), weights.transpose(1, 2)).unsqueeze(-1)
        return x + F.silu(self.out(v + context))


class NormBlock(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.na, self.nb, self.act = nn.GroupNorm(4, o), nn.GroupNorm(4, o), nn.SiLU(inplace=True)
        self.short = nn.Conv2d(i, o, 1, stride) if i != o or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.nb(self.b(self.act(self.na(self.a(x)))))
        return self.act(y + self.short(x))  # type: ignore[no-any-return]


class DenseLayer(nn.Module):
    def __init__(self, i: int, growth: int) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(i), nn.SiLU()
        self.conv = nn.Conv2d(i, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(self.act(self.norm(x)))], 1)


def _end(c: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)]


def efficient() -> nn.Module:
    return _mobile(nn.SiLU, nn.Sigmoid)


def mobile3() -> nn.Module:
    return _mobile(nn.Hardswish, nn.Hardsigmoid)


def convnext() -> nn.Module:
    blocks = [NextBlock(12) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 12, 4, 4), *blocks, *_end(12))


def gated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), *[GatedBlock(12) for _ in range(2)], *_end(12))


def groupnorm() -> nn.Module:
    blocks = [NormBlock(8, 8, 1), NormBlock(8, 16, 2), NormBlock(16, 16, 1)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), *blocks, *_end(16))


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), *[DenseLayer(8 + 6 * i, 6) for i in range(4)], *_end(32))


NETS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (efficient, mobile3, convnext, gated, groupnorm, dense)
}
INPUT = (2, 3, 16, 16)


def adapted_net(name: str, rank: int = 2) -> fx.GraphModule:
    """One of the nets, adapted, with adapters that are not zero."""
    torch.manual_seed(0)
    model = randomized(NETS[name]())
    subject = subject_of(Source(model, torch.randn(INPUT)))
    gm = adapted(subject, Plan("memflora", Options(rank)), verified=False)[0].gm
    randomize_adapters(gm)
    return gm
