"""What every layer with an adapter has in common."""

from torch import nn


class Adapter(nn.Module):
    """A frozen layer with trained factors of rank `rank` (0: none)."""

    rank: int

    def axes(self) -> dict[str, tuple[int, set[int]]]:
        """Tensor -> its rank axis and its width axes; what is not named has widths in axes 0 and 1."""
        raise NotImplementedError


def adapters(model: nn.Module) -> list[tuple[str, Adapter]]:
    """Path and layer of every adapter in a model."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, Adapter) and m.rank]
