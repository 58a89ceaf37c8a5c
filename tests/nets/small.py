"""Small models that several tests share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Stem, max-pool, a residual block with projection, head: every kind of site, quick to run."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * width)
        self.proj = nn.Conv2d(width, 2 * width, 1)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(2 * width, 5)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()  # type: ignore[union-attr]
                m.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.normal_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn(self.stem(x))))
        x = F.relu(self.bn1(self.conv(x)) + self.proj(x))
        return self.fc(self.drop(x.mean((2, 3))))


def residual() -> Residual:
    """A factory, as the command line names one."""
    return Residual()


class Smooth(nn.Module):
    """SiLU keeps a full-width map that no bit can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


def smooth() -> Smooth:
    """A factory whose rewritten model stays above the floor."""
    return Smooth()


class Inverted(nn.Module):
    """Two inverted residuals, one with a skip; then a head."""

    def __init__(self, nd: int = 2, act: type[nn.Module] = nn.ReLU6, bias: bool = True) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d)[nd - 1]
        self.stem = conv(3, 4, 3, padding=1)

        def body(out: int, stride: int) -> nn.Sequential:
            middle = conv(24, 24, 3, stride, padding=1, groups=24, bias=bias)
            return nn.Sequential(conv(4, 24, 1, bias=bias), act(), middle, act(), conv(24, out, 1, bias=bias))

        self.same, self.down = body(4, 1), body(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.relu(self.down(x + self.same(x))).mean(2)
