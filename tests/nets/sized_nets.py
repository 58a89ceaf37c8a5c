"""A family of models that keep a full map at some sizes, in some modes or in their state, and at others do not."""

import operator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 12
_COMPARES = (operator.gt, operator.lt, operator.eq, operator.ne, operator.ge)
_READS = ("shape", "size", "int", "len", "range", "area", "numel", "parity")


@dataclass(frozen=True)
class Condition:
    """One comparison of a size of the input."""

    read: str
    axis: int
    compare: Any
    limit: int

    def holds(self, x: Tensor) -> Any:
        """As the model's code asks it."""
        n = x.shape[self.axis]
        asked: Any = {
            "shape": lambda: n,
            "size": lambda: x.size(self.axis) + 1,
            "int": lambda: int(n),
            "len": lambda: len(x),
            "range": lambda: sum(1 for _ in range(n)),
            "area": lambda: x.shape[2] * x.shape[3] // 8,
            "numel": lambda: x.numel() // 100,
            "parity": lambda: n % 3,
        }[self.read]()
        return self.compare(asked, self.limit)


class Member(nn.Module):
    """A frozen conv and a gain; what it keeps depends on `plan`."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.register_buffer("memo", torch.zeros(0))
        self.grows, self.by_mode = random.random() < 0.1, random.random() < 0.15
        self.way = random.choice(("never", "any", "all", "nested", "never"))
        reads = random.choices(_READS, (4, 3, 1, 1, 1, 2, 2, 2), k=random.randint(1, 3))
        limits = {"parity": (0, 1, 2), "numel": (10, 90, 300), "area": (9, 60, 200)}
        self.conditions = [
            Condition(
                r, random.choice((0, 2, 3)), random.choice(_COMPARES), random.choice(limits.get(r, (3, 9, 20, 33)))
            )
            for r in reads
        ]
        self.train(random.random() < 0.7)
        if random.random() < 0.3:
            self.register_forward_hook(lambda m, given, out: None)  # not traced

    def keeps(self, x: Tensor) -> bool:
        """Whether a full map is kept at this size."""
        if self.by_mode and not self.training:
            return False
        if self.way == "any":
            return any(c.holds(x) for c in self.conditions)
        if self.way in ("all", "nested"):
            return all(c.holds(x) for c in self.conditions)
        return False

    def forward(self, x: Tensor) -> Tensor:
        """gain * map, or map + gain"""
        y = self.conv(x)
        if self.grows:
            with torch.no_grad():
                self.memo.resize_(y.shape).zero_()
        return y * self.gain if self.keeps(x) else y + self.gain


def member(seed: int) -> Member:
    """The model of a seed."""
    torch.manual_seed(seed)
    return Member(Random(seed))


def full_map_at(model: Member, seed: int, sizes: int = 12) -> tuple[int, ...] | None:
    """The first of some sizes at which a real forward keeps a full map, by saved-tensor hooks alone."""
    random = Random(-seed)
    for _ in range(sizes):
        shape = (
            random.choice((1, 2, 4, 9, 10, 17, 21, 34)),
            3,
            *(random.choice((8, 12, 19, 20, 33, 40)) for _ in "HW"),
        )
        most, before = [0], {t.untyped_storage().nbytes() for t in model.buffers()}

        def pack(t: Tensor, most: list[int] = most) -> Tensor:
            most[0] = max(most[0], t.untyped_storage().nbytes() if t.requires_grad or t.dim() == 4 else 0)
            return t

        x = torch.randn(shape)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x)
        grown = {t.untyped_storage().nbytes() for t in model.buffers()} != before
        if grown or most[0] >= 4 * shape[0] * WIDTH * shape[2] * shape[3]:
            return shape
    return None
