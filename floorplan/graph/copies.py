"""Copies of a graph that share its tensors."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from floorplan.torch_doors import FakeTensor, FakeTensorMode, NormBase, buffers_of, parameters_of, tensors_of

M = TypeVar("M", bound=nn.Module)


def clone_structure(gm: M) -> M:
    """A deep copy of a model or graph that shares the tensors."""
    memo: dict[int, Any] = {id(t): t for m in gm.modules() for t in own_tensors(m)}
    # A weight that a hook recomputes is no leaf, which deepcopy refuses.
    memo |= {id(t): t for m in gm.modules() for t in vars(m).values() if isinstance(t, Tensor)}
    twin = copy.deepcopy(gm, memo)
    for m in twin.modules():
        if isinstance(m, NormBase) and m.momentum is None:
            m.momentum = 0.1  # else it reads a counter's value, which a fake has not
    return twin


def own_tensors(m: nn.Module) -> list[Tensor]:
    return [t for t in tensors_of(m).values() if t is not None]


def replace_tensors(gm: nn.Module, make: Callable[[str, Tensor, nn.Module], Tensor]) -> None:
    """Replace every parameter and buffer by make(name, tensor, module), ties kept."""
    memo: dict[int, Tensor] = {}
    for path, m in gm.named_modules():
        stores: tuple[dict[str, Any], ...] = (parameters_of(m), buffers_of(m))
        for store in stores:
            for key, t in store.items():
                if t is None:
                    continue
                if id(t) not in memo:
                    fake = make(f"{path}.{key}", t, m)
                    if isinstance(t, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=t.requires_grad)
                    memo[id(t)] = fake
                store[key] = memo[id(t)]


def hollow(gm: M) -> M:
    """A copy whose large tensors are fakes: it takes no memory, and passes may rewrite it; small ones are shared.

    What a pass reads of a model is one value a channel: the statistics and scales of its norms.
    """
    mode, twin = FakeTensorMode(allow_non_fake_inputs=True), clone_structure(gm)

    def made(name: str, t: Tensor, m: nn.Module) -> Tensor:
        return mode.from_tensor(t.detach(), static_shapes=True) if t.dim() > 1 else t.detach()

    replace_tensors(twin, made)
    return twin


def filled_in(gm: M) -> M:
    """A hollow copy, in place, with memory that is never touched behind its large tensors."""

    def real(name: str, t: Tensor, m: nn.Module) -> Tensor:
        if not isinstance(t, FakeTensor):
            return t.detach()
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)

    replace_tensors(gm, real)
    return gm
