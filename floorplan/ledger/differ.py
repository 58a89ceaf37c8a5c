"""How far two tensors are apart."""

import torch
from torch import Tensor


def size_of(t: Tensor) -> float:
    t = t[torch.isfinite(t)]
    return float(t.abs().max()) if t.numel() else 0.0


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry of `want`, taken as no smaller than `floor`."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    scale = max(float(want.abs().max()), floor)
    worst = float((got - want).abs().max())
    return worst / scale if scale > 0 else worst
