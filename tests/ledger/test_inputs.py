"""Inputs are found for a model by trying sizes on fakes, and made smaller for verification."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hard_nets import Lambda, block2, pair, same
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.graph.trace import trace
from floorplan.ledger.inputs import arguments, infer_shape, make_inputs, resized, smaller_inputs


def test_a_convolutional_net_takes_the_first_size() -> None:
    shape, how = infer_shape(Lambda(block2, **pair(8)))
    assert shape == (3, 224, 224) and "first conv of 3 channels" in how


def test_a_linear_head_decides_the_size() -> None:
    def run(m: Lambda, x: Tensor) -> Any:
        return m.fc(F.max_pool2d(m.c1(x), 4).flatten(1))

    assert infer_shape(Lambda(run, c1=same(1, 8), fc=nn.Linear(8 * 49, 10)))[0] == (1, 28, 28)


def test_one_dimension() -> None:
    model = Lambda(lambda m, x: m.fc(m.c1(x).flatten(1)), c1=nn.Conv1d(9, 4, 1), fc=nn.Linear(1200, 3))
    assert infer_shape(model)[0] == (9, 300)


def test_what_a_model_declares_comes_first() -> None:
    model: Any = Lambda(block2, **pair(8))
    model.example_input_shape = (3, 20, 30)
    assert infer_shape(model) == ((3, 20, 30), "the model's example_input_shape")
    model = Lambda(block2, **pair(8))
    model.pretrained_cfg = {"input_size": (3, 40, 40)}
    assert infer_shape(model)[0] == (3, 40, 40)


def test_a_linear_model() -> None:
    assert infer_shape(nn.Sequential(nn.Linear(6, 3)))[0] == (6,)


def test_nothing_fits(capfd: pytest.CaptureFixture[str]) -> None:
    model = Lambda(lambda m, x: m.fc(m.c1(x).flatten(1)), c1=same(3, 8), fc=nn.Linear(7, 2))
    with pytest.raises(FloorplanError, match="--input C,H,W"):
        infer_shape(model)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "forward", [lambda m, x: m.c1(x.image), lambda m, x: m.c1(x, lengths=None), lambda m, x: m.c1(F.one_hot(x))]
)
def test_no_other_sizes_are_asked_for_where_sizes_are_not_at_fault(forward: Any) -> None:
    with pytest.raises(FloorplanError, match=r"^input: forward does not take one tensor of floats \(.*in Python$"):
        infer_shape(Lambda(forward, c1=same(3, 8)))


def test_inputs_follow_the_model() -> None:
    (a, b) = make_inputs(Lambda(block2, **pair(8)).double(), [(3, 4, 4), (7,)], 5)
    assert a.shape == (5, 3, 4, 4) and b.shape == (5, 7) and a.dtype == torch.float64


def test_smaller_inputs_where_the_graph_takes_them() -> None:
    x = torch.randn(8, 3, 100, 90)
    free = trace(Lambda(block2, **pair(8)), (x,)).gm
    assert smaller_inputs(free, (x,))[0].shape == (2, 3, 64, 64)
    tied = trace(Lambda(lambda m, x: m.fc(m.c1(x).flatten(1)), c1=same(3, 2), fc=nn.Linear(18000, 2)), (x,)).gm
    assert smaller_inputs(tied, (x,))[0].shape == (2, 3, 100, 90)
    assert smaller_inputs(free, (x, 3)) == (x, 3)


def test_arguments_of_a_forward() -> None:
    a, b = torch.zeros(1), torch.zeros(2)
    assert arguments(a) == (a,) and arguments({"a": a}) == ({"a": a},)
    assert arguments([a, b]) == arguments((a, b)) == (a, b)


def test_nests_are_resized() -> None:
    given = {
        "map": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "more": [torch.zeros(2), torch.tensor(1.0), 7],
    }
    found = resized(given, 5)
    assert found["map"].shape == (5, 3, 4, 4) and found["map"].is_contiguous(memory_format=torch.channels_last)
    assert found["more"][0].shape == (5,) and found["more"][1].dim() == 0 and found["more"][2] == 7
