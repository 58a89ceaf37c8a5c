"""Tensors in nested containers, and their bytes."""

import torch
from torch import nn

from floorplan.trees import arguments, bytes_of_tensors, model_state, storage_key


def test_bytes_count_a_tensor_once() -> None:
    a, b = torch.zeros(3), torch.zeros(2, dtype=torch.float64)
    assert bytes_of_tensors([a, b, a]) == 12 + 16 and bytes_of_tensors([]) == 0
    assert bytes_of_tensors([a, a[:1]]) == 16  # a view is a tensor of its own


def test_arguments_of_a_forward() -> None:
    a, b = torch.zeros(1), torch.zeros(2)
    assert (
        arguments(a) == (a,) and arguments([a, b]) == arguments((a, b)) == (a, b) and arguments({"a": a}) == ({"a": a},)
    )


def test_a_storage_has_one_key() -> None:
    a = torch.zeros(4)
    assert storage_key(a) == storage_key(a.view(2, 2)) != storage_key(a.clone())


def test_state_is_parameters_and_buffers() -> None:
    norm = nn.BatchNorm2d(3)
    assert {id(t) for t in model_state(norm)} == {id(t) for t in (*norm.parameters(), *norm.buffers())}
