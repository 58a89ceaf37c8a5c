"""What must hold when a compiled step is called: it was written for one set of trainables, in one precision.

Where its schedule has parts, samples do not touch (samples.py) and a loss that is said to add up is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.losses import Loss, Named, Shared
from floorplan.step.program import Program
from floorplan.step.runner import head_size, sliced
from floorplan.step.samples import batched, refuse_coupled
from floorplan.step.schedule import Schedule
from floorplan.torch_doors import FakeTensor, has_gradient_hook, hooks_of, map_tensors, tensors_in

SAMPLES = 4


@dataclass(repr=False)
class Compiled:
    """What is looked at of a step."""

    module: fx.GraphModule
    schedule: Schedule
    program: Program
    loss: Loss
    mean: bool | None  # what the user says of a loss that is not torch's: a mean over samples, a sum, or nothing
    trained: tuple[str, ...]  # what required a gradient when it was compiled


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Names of what requires a gradient, buffers among them."""
    return tuple(n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.requires_grad)


def ready(step: Compiled, given: tuple[Any, ...]) -> None:
    """FloorplanError where a call would not do what the compiled code was written for."""
    takes = len(step.program.inputs)
    if len(given) != takes + 1:
        raise FloorplanError(f"step: takes {takes} inputs and a target, {len(given)} values were given")
    found = list(tensors_in(given[:-1]))
    batch = next((t.shape[0] for t in found if t.dim()), None)
    if not batch:
        raise FloorplanError("step: no input is a tensor with samples in it; give tensors, batch first")
    if (now := trainable_names(step.module)) != step.trained:
        changed = sorted(set(now) ^ set(step.trained))
        raise FloorplanError(f"step: {changed[0]} was frozen or unfrozen since it was compiled; compile it again")
    if torch.is_autocast_enabled(found[0].device.type):
        raise FloorplanError("step: runs in the model's own precision; call it outside autocast")
    if torch.is_inference_mode_enabled():
        raise FloorplanError("step: inference mode keeps no gradients; call it outside torch.inference_mode()")
    _refuse_hooks(step)
    if step.schedule.parts:
        refuse_coupled(step.module, step.program.example)
        _refuse_rows(step, found, batch)


def _refuse_rows(step: Compiled, found: Sequence[Tensor], batch: int) -> None:
    """FloorplanError for an input of which it cannot be told whether parts of the batch have parts of it."""
    micro, known = step.schedule.micro_batch or batch, batched(step.program.example)
    if len(known) != len(found):
        raise FloorplanError(f"step: compiled for {len(known)} input tensors, these are {len(found)}; compile it again")
    for k, (t, has) in enumerate(zip(found, known, strict=True)):
        rows = t.shape[0] if t.dim() else None
        if has and rows != batch:
            raise FloorplanError(f"step: tensor {k} of the inputs has {rows} rows for {batch} samples; give one each")
        if not has and rows in (batch, micro, batch % micro):
            why = f"has as many rows as {rows} samples, which those that it was compiled for did not"
            raise FloorplanError(f"step: tensor {k} of the inputs {why}; compile it for another batch")


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


def refuse_unsplit(step: Compiled, inputs: Sequence[Any], target: Any) -> None:
    """Where the user says that a loss adds up: try it on random outputs of few samples, whole and in two parts."""
    batch = next(len(t) for t in tensors_in(tuple(inputs)) if t.dim())
    alone = head_size(batch, step.schedule.micro_batch, step.schedule.last) == batch
    if isinstance(step.loss, Named) or step.mean is None or alone:
        return
    outs, n = step.program.values[step.program.head.nodes[-1].name], min(batch, SAMPLES)
    g = torch.Generator().manual_seed(0)
    given = list(tensors_in(target))
    device = next((t.device for t in given), torch.device("cpu"))

    def drawn(t: Tensor) -> Tensor:
        if not t.dim():
            return t
        return torch.randn((n, *t.shape[1:]), generator=g).to(device=device, dtype=t.dtype)

    out, some, shared = map_tensors(drawn, outs), sliced(target, slice(0, n), batch), Shared(step.loss, step.mean, n)
    parts = slice(0, n // 3 or 1), slice(n // 3 or 1, n)
    with torch.no_grad():
        whole = shared.whole(out, some)
        pieces = [(shared.part(sliced(out, p, n), sliced(some, p, n)), shared.factor(p.stop - p.start)) for p in parts]
    if any(isinstance(t, FakeTensor) for t in given):
        return
    value, total = float(whole), sum(float(v) * factor for v, factor in pieces)
    if not math.isfinite(value) or not math.isfinite(total):
        why = f"is {value:.4g} of {n} samples and {total:.4g} of their parts"
        raise FloorplanError(f"step: the loss {why}: it cannot be shared out; leave reduction= out")
    if abs(total - value) > 1e-3 * max(abs(value), abs(total), 1e-3):
        what = f"the {'mean' if step.mean else 'sum'} of its parts' losses ({value:.4g}, {total:.4g})"
        why = "it weighs or couples samples; leave reduction= out, and it sees them all"
        raise FloorplanError(f"step: the loss of a batch is not {what}: {why}")
