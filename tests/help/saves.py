"""What the tests of the layers share: closeness of gradients, and what a layer hands to autograd."""

import torch
from torch import Tensor, nn


def drawn(*shape: int) -> Tensor:
    """Random float64 numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    """Same shape, same dtype, and differences small beside the largest entry, which is not zero."""
    got, want = got.detach(), want.detach()
    scale = float(want.abs().max())
    assert got.shape == want.shape and got.dtype == want.dtype and scale > 0
    assert float((got - want).abs().max()) <= tolerance * scale


def handed(layer: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What the layer hands to save-for-backward, its own state apart."""
    own = {t.untyped_storage()._cdata for t in (*layer.parameters(), *layer.buffers())}
    found: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(*inputs)
    return [t for t in found if t.untyped_storage()._cdata not in own]


def kinds(layer: nn.Module, *inputs: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what it hands over."""
    return [(tuple(t.shape), t.dtype) for t in handed(layer, *inputs)]
