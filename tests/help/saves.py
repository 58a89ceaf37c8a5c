"""What the tests of the layers share: closeness of gradients, and what a layer hands to autograd."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.bits import layout_of


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


def kept(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output, and the saved tensors that are not the module's own state."""
    saved: list[Tensor] = []
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}  # alive, so are their keys

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    return y, saved


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the saved tensors that are not the module's own state."""
    return sum(t.nbytes for t in kept(module, x)[1])


def same(plain: nn.Module, packed: Any, x: Tensor, seed: int = 0) -> None:
    """Equal outputs and gradients, bit for bit; x untouched; rebuilt from config."""
    options = json.loads(json.dumps(packed.config()))
    rebuilt = type(packed)(**options).train(packed.training).to(x.dtype)
    rebuilt.load_state_dict(packed.state_dict())
    before = x.detach().clone()
    a = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(seed)
    want = plain(a)
    g = torch.randn_like(want)
    (ga,) = torch.autograd.grad(want, a, g)
    for module in (packed, rebuilt):
        b = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        torch.manual_seed(seed)
        got = module(b)
        assert torch.equal(want, got) and want.dtype == got.dtype
        (gb,) = torch.autograd.grad(got, b, g)
        assert torch.equal(ga, gb)
        assert torch.equal(b, before)
        assert layout_of(got) == layout_of(want)


def spatial(dims: int) -> tuple[int, ...]:
    """The shape of a batch of maps of so many dimensions."""
    return (3, 5, *((9, 7, 6)[:dims]))


def formats(x: Tensor) -> list[Tensor]:
    """A map in both memory formats; another tensor as it is."""
    if x.dim() not in (4, 5):
        return [x]
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return [x, x.to(memory_format=last)]
