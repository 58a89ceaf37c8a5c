"""Traced values that can be asked about sizes, and whose in-place syntax stays in place."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from floorplan.graph.trace import trace


class Net(nn.Module):
    """A forward given as a function."""

    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fn = [fn]

    def forward(self, x: Tensor) -> Any:
        return self.fn[0](x)


def targets(fn: Callable[[Tensor], Any]) -> tuple[list[Any], dict[str, str]]:
    """What the traced graph calls, and what stayed opaque."""
    traced = trace(Net(fn), (torch.randn(3, 4),))
    return [n.target for n in traced.gm.graph.nodes if n.op.startswith("call")], traced.opaque


def augmented(op: Any) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = x * 1
        y = op(y, 2)
        return y

    return fn


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod"])
def test_augmented_assignments_are_nodes_of_their_own(name: str) -> None:
    op = getattr(operator, name)
    assert targets(augmented(op)) == ([operator.mul, op], {})


def test_items_are_set_in_place() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 1
        y[:, 0] = 0
        return y

    assert targets(fn) == ([operator.mul, operator.setitem], {})


def test_sizes_become_numbers() -> None:
    def fn(x: Tensor) -> Any:
        halves = range(int(x.shape[1]) // 2)
        return [x[: len(x)] * float(x.size(0)) for _ in halves]

    found, opaque = targets(fn)
    assert found.count(operator.mul) == 2 and not opaque


def test_what_a_tensor_has_is_asked_of_it() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if hasattr(x, "shape") and not hasattr(x, "no_such_attribute") else x + 1

    assert targets(fn) == ([operator.mul], {})


def test_an_attribute_put_on_a_tensor_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        x.tag = 1  # type: ignore[attr-defined]
        return x * 2

    _, opaque = targets(fn)
    assert "sets the attribute `tag` of a tensor" in next(iter(opaque.values()))
