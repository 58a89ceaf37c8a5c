"""What the tests of compiled steps share: adapted graphs, losses that parts of a batch can share, references."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Source, subject_of
from floorplan.methods.verify import randomize_adapters
from floorplan.step.compile import Schedule, Step, compile_step
from floorplan.torch_doors import tensors_in


def graph_of(model: nn.Module, x: Any, rank: int = 2, sites: str = "all", train_head: bool = False) -> fx.GraphModule:
    """The adapted graph of a model, U random, BatchNorm statistics and affine random."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_var is not None:
            nn.init.uniform_(m.running_var, 0.5, 2.0)
            nn.init.normal_(m.running_mean, 0.0, 0.3)  # type: ignore[arg-type]
            if m.affine:
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.normal_(m.bias, 0.0, 0.5)
    s = subject_of(Source(model, x))
    gm = adapted(s, Plan("memflora", Options(rank, sites, 0, train_head)), verified=False)[0].gm
    randomize_adapters(gm)
    gm.meta["floorplan"] = {"input": [list(t.shape) for t in s.inputs if isinstance(t, Tensor)]}
    return gm


def weighted(out: Any, weights: Sequence[Tensor]) -> Tensor:
    """Every output times given weights, summed: a loss of samples that add up."""
    return torch.stack([(t * w).sum() for t, w in zip(tensors_in(out), weights, strict=True)]).sum()


def weights_for(gm: nn.Module, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Random weights of the shapes of the outputs."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        outs = list(tensors_in(copy.deepcopy(gm)(*inputs)))
    return tuple(torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in outs)


def gradients(gm: nn.Module) -> dict[str, Tensor]:
    """name -> .grad of what trains, taken away."""
    out = {}
    for n, p in gm.named_parameters():
        if p.requires_grad and p.grad is not None:
            out[n] = p.grad
        p.grad = None
    return out


def by_autograd(
    gm: nn.Module, inputs: Sequence[Any], target: Any, loss: Any = weighted
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of plain autograd."""
    gradients(gm)
    value = loss(gm(*inputs), target)
    value.backward()
    return value.detach(), gradients(gm)


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest error over the largest gradient."""
    assert {n for n, g in want.items() if g.abs().max() > 0} <= set(got) <= set(want)
    top = max((float(g.abs().max()) for g in want.values()), default=1.0) or 1.0
    return max((float((got[n] - want[n]).abs().max()) for n in got), default=0.0) / top


def check(gm: fx.GraphModule, inputs: Sequence[Any], schedule: Schedule, tolerance: float = 1e-12) -> Step:
    """A compiled step has the loss and the gradients of plain autograd."""
    target = weights_for(gm, inputs)
    value, want = by_autograd(gm, inputs, target)
    step = compile_step(gm, weighted, inputs, plan=schedule, reduction="sum")
    got = step(*inputs, target)
    assert torch.allclose(got, value, rtol=1e-9, atol=1e-9)
    error = worst(gradients(gm), want)
    assert error <= tolerance, (error, str(schedule))
    return step
