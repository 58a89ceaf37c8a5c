"""Losses of every kind for steps in parts: torch's own, and those that see samples together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.ledger.losses import loss

CLASSES = 5


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    """Every sample against all others of the batch."""
    z = F.normalize(out.flatten(1), dim=1)
    return F.cross_entropy(z @ z.t() / 0.3, torch.arange(len(z)))


def dice(out: Tensor, y: Tensor) -> Tensor:
    """One ratio of the whole batch."""
    p, k = out.softmax(1)[:, 1], (y == 1).to(out)
    return 1 - (2 * (p * k).sum() + 1) / (p.sum() + k.sum() + 1)


def hardest(out: Tensor, y: Tensor) -> Tensor:
    """The quarter of all terms with the largest loss (OHEM)."""
    each = F.cross_entropy(out, y, reduction="none", ignore_index=255).flatten()
    return each.topk(max(1, len(each) // 4)).values.mean()


def triplet(out: Tensor, y: Tensor) -> Tensor:
    """For each sample the farthest of its class and the nearest of another (batch-hard)."""
    z, k = out.flatten(1), y.flatten(1)[:, 0] if y.dim() > 1 else y
    apart = (z[:, None] - z[None]).square().sum(-1)
    same = k[:, None] == k[None]
    far, near = (apart * same).amax(1), (apart + same * 1e6).amin(1).clamp(max=1e5)
    return F.relu(far - near + 1).mean()


def focal(out: Tensor, y: Tensor) -> Tensor:
    """By the number of positives in the batch."""
    k = F.one_hot(y.clamp(max=CLASSES - 1), CLASSES).movedim(-1, 1).to(out)
    each = F.binary_cross_entropy_with_logits(out, k, reduction="none")
    return (each * (k - out.sigmoid()).square()).sum() / (y == 1).sum().clamp(min=1)


def correlation(out: Tensor, y: Tensor) -> Tensor:
    """Concordance of two vectors over the batch."""
    a, b = out.flatten(1)[:, 0], y.flatten(1)[:, 0].to(out) if y.dim() > 1 else y.to(out)
    a, b = a - a.mean(), b - b.mean() + 0.1 * out.flatten(1).mean(1)
    return 1 - 2 * (a * b).mean() / (a.var() + b.var() + 1e-2)


def each(out: Tensor, y: Tensor) -> Tensor:
    """One value a sample."""
    return F.cross_entropy(out, y, reduction="none", ignore_index=255).reshape(len(out), -1).mean(1)


def named(shape: tuple[int, ...]) -> list[tuple[Any, Callable[[], Tensor]]]:
    """(loss, a target for outputs of this shape) of torch's losses with options."""
    w = torch.rand(CLASSES, dtype=torch.float64) + 0.2
    column = w.reshape(-1, *[1] * (len(shape) - 2))

    def numbers(void: float = 0.0) -> Tensor:
        y = torch.randint(0, CLASSES, (shape[0], *shape[2:]))
        y[torch.rand(y.shape) < void] = 255
        if void and len(y) > 1:
            y[0] = 255  # a sample without any
        return y

    def real() -> Tensor:
        return torch.rand(shape, dtype=torch.float64)

    def shares() -> Tensor:
        return torch.softmax(torch.randn(shape, dtype=torch.float64), 1)

    return [
        ("cross_entropy", numbers),
        (nn.CrossEntropyLoss(w, ignore_index=255, label_smoothing=0.1), lambda: numbers(0.4)),
        (partial(F.cross_entropy, ignore_index=255), lambda: numbers(0.4)),
        (nn.CrossEntropyLoss(w, label_smoothing=0.1), shares),
        (loss("nll", weight=w, ignore_index=255), lambda: numbers(0.3)),
        (nn.MSELoss(), real),
        (nn.L1Loss(reduction="sum"), real),
        (nn.SmoothL1Loss(beta=0.2), real),
        (nn.BCEWithLogitsLoss(pos_weight=column), real),
        (loss("bce_with_logits", weight=torch.rand(shape[0], *[1] * (len(shape) - 1), dtype=torch.float64)), real),
        (loss("kl_div", reduction="batchmean"), shares),
    ]


def others(shape: tuple[int, ...]) -> list[tuple[Any, Callable[[], Tensor]]]:
    """The same of losses that nobody says anything of."""

    def numbers() -> Tensor:
        return torch.randint(0, CLASSES, (shape[0], *shape[2:]))

    return [(f, numbers) for f in (contrastive, dice, hardest, triplet, focal, correlation, each)]
