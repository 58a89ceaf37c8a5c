"""Copies of a graph that share its tensors."""

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

from floorplan.torch_doors import NormBase, tensors_of

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
