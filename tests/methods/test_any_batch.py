"""A rewrite whose graph stands for the batch traced alone is refused, with the line that made it so."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floorplan
from floorplan.errors import FloorplanError

X = torch.randn(2, 8, 20)


class Net(nn.Module):
    """A conv, and what is made of its result."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.c, self.after = nn.Conv1d(8, 16, 1), after

    def forward(self, x: Tensor) -> Any:
        return self.after(torch.relu(self.c(x)))


PINNED = {
    "an int": lambda y: y + torch.arange(int(y.shape[0]))[:, None, None],
    "a range": lambda y: torch.stack([y[i].mean() for i in range(y.shape[0])]),
    "a divisor": lambda y: y / int(y.shape[0]),
    "a loop": lambda y: torch.stack([v.sum() for v in y]),
    "a branch": lambda y: y * 2 if y.shape[0] < 3 else y,
    "a branch at one": lambda y: y.mean(0) if y.shape[0] == 1 else y,
    "a list": lambda y: torch.cat([y[:1] * k for k in [1.0] * len(y)]),
    "a reshape": lambda y: y.reshape(int(y.shape[0]) * 16, -1),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_number_made_of_the_batch_is_refused(name: str) -> None:
    with pytest.raises(FloorplanError, match=r"^Net: its graph stands for one batch size alone: at batch [13].*") as e:
        floorplan.rewrite(Net(PINNED[name]), X, sites="all", measured=False)
    assert "test_any_batch.py:" in str(e.value) and "\n" not in str(e.value) and "--input" not in str(e.value)


FREE = {
    "a size": lambda y: y.reshape(y.shape[0], -1),
    "a length": lambda y: y.view(len(y), -1) / len(y),
    "a mask": lambda y: y * (torch.rand(len(y), 1, 1) < 2),
    "a roll over the batch": lambda y: y - y.roll(1, 0),
}


@pytest.mark.parametrize("name", FREE)
def test_what_follows_the_batch_is_taken(name: str) -> None:
    found = floorplan.rewrite(Net(FREE[name]), X, sites="all", measured=False)
    assert [len(found.module(torch.randn(n, 8, 20))) for n in (1, 2, 5)] == [1, 2, 5]


def test_a_model_that_takes_one_batch_alone_is_no_fault() -> None:
    found = floorplan.rewrite(Net(lambda y: y.view(2, 320)), X, sites="all", measured=False)
    assert found.module(X).shape == (2, 320)
