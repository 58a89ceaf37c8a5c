"""How far two tensors are apart."""

import math

import pytest
import torch

from floorplan.ledger.differ import relative_error, size_of


@pytest.mark.parametrize(
    "got,want,floor,error",
    [
        ([1.0, 2.0], [1.0, 4.0], 0.0, 0.5),
        ([1.0, 2.0], [1.0, 4.0], 8.0, 0.25),
        ([0.0, 3.0], [0.0, 0.0], 0.0, 3.0),
        ([-1.0], [1.0], 0.0, 2.0),
        ([], [], 0.0, 0.0),
        ([1.0], [1.0, 1.0], 0.0, math.inf),
    ],
)
def test_relative_error(got: list[float], want: list[float], floor: float, error: float) -> None:
    assert relative_error(torch.tensor(got), torch.tensor(want), floor) == error


def test_size_is_of_what_is_finite() -> None:
    assert size_of(torch.tensor([1.0, -3.0, math.inf, math.nan])) == 3.0
    assert size_of(torch.tensor([math.nan])) == size_of(torch.empty(0)) == 0.0
