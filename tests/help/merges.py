"""Adapted graphs and how their merged twins are held against them."""

import copy
from typing import Any

import torch
from graphs import randomize
from torch import fx, nn

from floorplan.graph.driver import rewrite
from floorplan.graph.trace import trace
from floorplan.methods.catalogue import METHODS, Options
from floorplan.methods.merge import difference, merge
from floorplan.methods.merge_file import delta_state
from floorplan.methods.verify import randomize_adapters, to_double


def adapted(
    model: nn.Module, *inputs: Any, method: str = "memflora", sites: str = "all", rank: int = 2
) -> fx.GraphModule:
    """Rewritten by a method, its adapters drawn; in eval mode."""
    gm = trace(model, inputs, both_modes=True).gm
    passes = METHODS[method].passes(Options(rank, sites))
    gm, _ = rewrite(gm, passes, lambda p, before, after: None)
    randomize_adapters(gm, 0.3)
    gm.meta["floorplan"] = {"method": method, "input": [list(t.shape) for t in inputs]}
    return gm.eval()


def moved(gm: fx.GraphModule, model: nn.Module, inputs: Any) -> bool:
    """Whether the adapters change the output at all: else a comparison says nothing."""
    return difference(copy.deepcopy(gm), copy.deepcopy(model).eval(), inputs) > 1e-3


def check(model: nn.Module, *inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Merge, compare in float64, and look for what is not torch's own; (adapted, merged)."""
    model, inputs = randomize(model).double(), to_double(inputs)
    gm = adapted(model, *inputs, **options)
    assert moved(gm, model, inputs)
    before = {k: t.clone() for k, t in gm.state_dict().items()}
    merged = merge(gm)
    assert difference(gm, merged, inputs) <= 1e-12
    assert all(torch.equal(t, before[k]) for k, t in gm.state_dict().items())
    foreign = {type(m).__name__ for m in merged.modules() if type(m).__module__[:9] == "floorplan"}
    assert foreign <= {"AnyBatchNorm", "TrainingFlag"}
    return gm, merged


def into_source(model: nn.Module, gm: fx.GraphModule, *inputs: Any) -> float:
    """Difference of the source with the adapters in its state_dict."""
    state = delta_state(gm, model)
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    assert not any(t.requires_grad for t in state.values())
    return difference(gm, twin, to_double(inputs))


def kinds_in(gm: fx.GraphModule) -> list[str]:
    """What the nodes call, in order."""
    nodes = [n for n in gm.graph.nodes if n.op in ("call_module", "call_function")]
    layers = [gm.get_submodule(n.target) if n.op == "call_module" else None for n in nodes]
    return [n.target.__name__ if m is None else type(m).__name__ for n, m in zip(nodes, layers, strict=True)]


X = torch.randn(2, 3, 12, 12)
