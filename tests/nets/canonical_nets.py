"""Canonical graphs of small nets, checked against the net they came from."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from floorplan.graph import driver
from floorplan.graph.trace import trace
from floorplan.passes.canonicalize import PASS

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A forward given as a function of the module and its input."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def show(gm: fx.GraphModule) -> str:
    """One line a node, modules by their constructor."""
    out = []
    for n in gm.graph.nodes:
        if n.op == "call_module":
            what = repr(gm.get_submodule(str(n.target)))
        else:
            what = getattr(n.target, "__name__", str(n.target))
        rest = ", ".join([*map(str, n.args), *(f"{k}={v}" for k, v in n.kwargs.items())])
        if n.op not in ("placeholder", "output"):
            out.append(f"{n.name} = {what} <- {rest}")
    return "\n".join(out)


def run(model: nn.Module, x: Tensor, mode: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, then the gradients of the input and of the (distinct) parameters."""
    model = copy.deepcopy(model).train(mode)
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    out = [t for t in tree_leaves(model(x * 1)) if isinstance(t, Tensor)]
    sum((t.float() ** 2).sum() for t in out if t.requires_grad).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return out, [cast(Tensor, x.grad), *sorted(grads, key=lambda g: (g.numel(), g.sum().item()))]


def canonical(model: nn.Module, x: Tensor = X) -> tuple[str, dict[str, str], fx.GraphModule]:
    """The canonical graph, checked against the model, and what was refused."""
    traced = trace(model, [x], both_modes=True)

    def check(p: driver.Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        for mode in (True, False):
            for want, got in zip(run(model, x, mode), run(after, x, mode), strict=True):
                assert len(want) == len(got)
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))

    gm, log = driver.rewrite(traced.gm, [PASS], check)
    lines = {n.name: n.meta.get("line") for n in gm.graph.nodes}
    assert all(lines[n] == t for n, t in traced.lines.items() if n in lines), "lines are kept"
    assert not list(PASS.run(gm)) or any(s.refused for s in log[PASS.name]), "a second run is idle"
    return show(gm), {s.node: s.refused for s in log[PASS.name]}, gm
