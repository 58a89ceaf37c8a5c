"""Tensors in nested containers, their storages and bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from floorplan.torch_doors import storage_key as storage_key
from floorplan.torch_doors import tree_iter


def bytes_of_tensors(ts: Sequence[Tensor]) -> int:
    once = {id(t): t.numel() * t.element_size() for t in ts}
    return sum(once.values())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers (dataclass outputs too)."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from tensors_in(dict(vars(leaf)))


def arguments(inputs: Any) -> tuple[Any, ...]:
    """What a user gave for a forward, its arguments or its only one, as arguments."""
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def model_state(model: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]
