"""What must hold when a compiled step is called: it was written for one set of trainables, in one precision.

A loss that does not add up over the parts of a batch would give wrong gradients in silence: it is tried first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.untouched import in_mode
from floorplan.ledger.differ import relative_error
from floorplan.ledger.inputs import filled, smaller_inputs
from floorplan.ledger.losses import COUNTED, Loss
from floorplan.step.program import Program
from floorplan.step.runner import sliced
from floorplan.step.schedule import Schedule
from floorplan.torch_doors import BatchNormNd, has_gradient_hook, hooks_of, tensors_in, tree_map

TRIED = 1 << 20  # elements of an output that a loss is tried on; of larger ones, four samples
SAMPLES = 4


@dataclass(repr=False)
class Compiled:
    """What is looked at of a step."""

    module: nn.Module
    schedule: Schedule
    program: Program
    loss: Loss
    mean: bool
    trained: tuple[str, ...]  # what required a gradient when it was compiled


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Names of what requires a gradient."""
    return tuple(n for n, p in model.named_parameters() if p.requires_grad)


def ready(step: Compiled, given: tuple[Any, ...]) -> None:
    """FloorplanError where a call would not do what the compiled code was written for."""
    takes = len(step.program.inputs)
    if len(given) != takes + 1:
        raise FloorplanError(f"step: takes {takes} inputs and a target, {len(given)} values were given")
    batch = next((t.shape[0] for t in given[:-1] if isinstance(t, Tensor) and t.dim()), None)
    if not batch:
        raise FloorplanError("step: no input is a tensor with samples in it; give tensors, batch first")
    if (now := trainable_names(step.module)) != step.trained:
        changed = sorted(set(now) ^ set(step.trained))
        raise FloorplanError(f"step: {changed[0]} was frozen or unfrozen since it was compiled; compile it again")
    device = next(t.device.type for t in given[:-1] if isinstance(t, Tensor))
    if torch.is_autocast_enabled(device):
        raise FloorplanError("step: runs in the model's own precision; call it outside autocast")
    if torch.is_inference_mode_enabled():
        raise FloorplanError("step: inference mode keeps no gradients; call it outside torch.inference_mode()")
    _refuse_hooks(step)
    if step.schedule.parts:
        refuse_coupled(step.module)
        _refuse_unsplit(step, given[-1], batch)


def _refuse_hooks(step: Compiled) -> None:
    """FloorplanError naming a hook that straight-line code would not call."""
    for path in step.program.refs:
        m = step.module.get_submodule(path)
        if hooks_of(m):
            raise FloorplanError(f"step: {path} got a hook since it was compiled; it would not run, so compile again")
    for name, p in step.module.named_parameters():
        if p.requires_grad and has_gradient_hook(p):
            why = "has a gradient hook, which a compiled step does not call"
            raise FloorplanError(f"step: {name} {why}; read .grad after the step instead")


def refuse_coupled(model: nn.Module) -> None:
    """FloorplanError naming a layer that couples the samples of a batch."""
    for name, m in model.named_modules():
        if isinstance(m, BatchNormNd) and (m.training or m.running_mean is None):
            why = f"({type(m).__name__}) normalises by the batch, which parts would change"
            raise FloorplanError(f"schedule: {name} {why}; use the whole batch, or eval mode")


_ALONE: WeakSet[nn.Module] = WeakSet()  # models whose samples were seen not to touch each other


def refuse_mixing(model: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """FloorplanError if a sample's output depends on the others of its batch: tried on a few random ones."""
    refuse_coupled(model)
    if model in _ALONE:
        return
    given = smaller_inputs(model, filled(inputs, 2))
    with in_mode(model, "eval"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        parts = (slice(0, 2), slice(0, 1), slice(1, 2))
        whole, *ones = (list(tensors_in(model(*sliced(given, part, 2)))) for part in parts)
    for k, out in enumerate(whole):
        if out.shape[:1] != (2,):
            why = f"the model's output {list(out.shape)} for two samples does not have them in front"
            raise FloorplanError(f"schedule: {why}, so a batch cannot be taken apart; use the whole batch")
        for i, one in enumerate(ones):
            if one[k].shape != out[:1].shape or relative_error(out[i : i + 1], one[k]) > 1e-3:
                why = "a sample's output depends on the other samples of its batch, which parts would change"
                raise FloorplanError(f"schedule: {why}; use the whole batch")
    _ALONE.add(model)


def _refuse_unsplit(step: Compiled, target: Any, batch: int) -> None:
    """Try the loss on random outputs: whole, and in two parts."""
    if step.loss in COUNTED or batch < 2:
        return
    outs = step.program.values[step.program.head.nodes[-1].name]  # what the module returns, on fakes
    elements = sum(t[0].numel() * batch for t in tensors_in(outs) if t.dim())
    n = batch if elements <= TRIED else min(batch, SAMPLES)
    g = torch.Generator().manual_seed(0)
    device = next((t.device for t in tensors_in(target)), torch.device("cpu"))

    def drawn(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim():
            return t
        return torch.randn((n, *t.shape[1:]), generator=g).to(device=device, dtype=t.dtype)

    out, some, k = tree_map(drawn, outs), sliced(target, slice(0, n), batch), max(1, n // 3)
    with torch.no_grad():
        whole = float(step.loss(out, some))
        halves = [float(step.loss(sliced(out, part, n), sliced(some, part, n))) for part in (slice(0, k), slice(k, n))]
    shared = (halves[0] * k + halves[1] * (n - k)) / n if step.mean else sum(halves)
    if whole == whole and abs(shared - whole) > 1e-3 * max(abs(whole), abs(shared), 1e-3):
        what = f"the {'mean' if step.mean else 'sum'} of its parts' losses ({whole:.4g}, {shared:.4g})"
        way_out = "take the whole batch, another reduction=, or a loss that adds up"
        raise FloorplanError(f"step: the loss of a batch is not {what}: it weighs or couples samples; {way_out}")
