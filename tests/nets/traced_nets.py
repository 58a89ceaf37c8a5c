"""Small nets for the tests of tracing, and what must hold of every trace."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from floorplan.graph.trace import Traced

X = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A forward given as a function of the module and its inputs."""

    def __init__(self, fn: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.fn(self, x)


def conv(i: int = 3, o: int = 3) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(i, o, 3, padding=1)


def same(model: nn.Module, traced: Traced, *inputs: Any) -> None:
    """Equal outputs in both modes; equal state_dict keys and parameter objects."""
    assert set(traced.gm.state_dict()) == set(model.state_dict())
    mine = dict(traced.gm.named_parameters())
    assert all(mine[n] is p for n, p in model.named_parameters())
    agree(model, traced.gm, *inputs)


def agree(model: nn.Module, gm: nn.Module, *inputs: Any) -> None:
    for mode in (True, False):
        out = []
        for m in (model, gm):
            m = copy.deepcopy(m).train(mode)
            torch.manual_seed(3)
            out.append(m(*[v.clone() if isinstance(v, Tensor) else v for v in inputs]))
        assert type(out[0]) is type(out[1])
        for a, b in zip(tree_leaves(out[0]), tree_leaves(out[1]), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def targets(traced: Traced) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in traced.gm.graph.nodes]
