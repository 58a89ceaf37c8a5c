"""Questions about sizes are answered on fake tensors; questions about values are told apart."""

import operator
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from floorplan.graph.decide import Evaluator, Undecided, ValueBranch, expression, place, raised_at, source_line


def graph(*calls: tuple[Any, ...]) -> tuple[Evaluator, list[fx.Node]]:
    """x (3, 4) and calls of functions on it."""
    g = fx.Graph()
    x = g.placeholder("x")
    nodes = [g.call_function(f, (x, *rest)) for f, *rest in calls]
    return Evaluator(nn.Module(), (torch.randn(3, 4),)), [x, *nodes]


def test_sizes_are_answered_without_running_the_model() -> None:
    e, (x, shape, total, more) = graph((getattr, "shape"), (torch.sum,), (operator.gt, 0))
    assert e.sizes() == "(3, 4)" and e.mode is None
    assert e.value(shape) == (3, 4) and e.value(x).shape == (3, 4)
    assert e.scalar(total.graph.call_function(operator.getitem, (shape, 1)), int) == 4
    with pytest.raises(ValueBranch):
        e.scalar(total, float)
    with pytest.raises(ValueBranch):
        e.scalar(more.graph.call_function(torch.any, (more,)), bool)


def test_what_fakes_cannot_run_is_undecided_and_says_why() -> None:
    e, (_, broken, asks) = graph((torch.reshape, (5,)), (torch.nonzero,))
    with pytest.raises(Undecided, match="cannot be decided on fake tensors: .*Error: .*5"):
        e.value(broken)
    with pytest.raises(Undecided):  # what reads it has no value either
        e.value(broken.graph.call_function(torch.relu, (broken,)))
    with pytest.raises(ValueBranch):
        e.value(asks)
    e, (x,) = graph()
    with pytest.raises(Undecided, match="cannot be read as int"):
        e.scalar(x.graph.call_method("size", (x,)), int)


def test_in_place_ops_count_once() -> None:
    g = fx.Graph()
    x = g.placeholder("x")
    y = g.call_method("unsqueeze_", (x, 0))
    first, second = (g.call_method("dim", (y,)) for _ in range(2))
    e = Evaluator(nn.Module(), (torch.randn(3, 4),))
    assert (e.value(first), e.value(second)) == (3, 3)


def test_layers_run_on_fakes_of_their_own_tensors() -> None:
    root = nn.Sequential(nn.Linear(4, 7))
    g = fx.Graph()
    y = g.call_module("0", (g.placeholder("x"),))
    w = g.get_attr("0.weight")
    e = Evaluator(root, (torch.randn(3, 4),))
    assert e.value(y).shape == (3, 7) and e.value(w).shape == (7, 4)
    assert type(root[0].weight) is nn.Parameter and not e.running


def test_places_in_the_users_code() -> None:
    frame = sys._getframe()
    assert place(frame).startswith("test_decide.py:") and place(None) == ""
    assert source_line(frame).startswith("assert source_line(frame)") and source_line(None) == ""
    assert expression(None) == ""

    def fails(x: Tensor) -> None:
        raise ValueError(x)

    try:
        fails(torch.zeros(1))
    except ValueError as e:
        assert raised_at(e.__traceback__) == f"test_decide.py:{fails.__code__.co_firstlineno + 1}"
    assert raised_at(None) == ""
