"""AdaBN: move BatchNorm statistics to the target domain before they are folded; no gradient, no label.

ema    running = (1-m)*running + m*batch, biased variance, each layer still normalising by what it had
       (as the MemFLoRA paper calibrates, on one batch, m the layer's momentum)
reset  running = mean over the batches of each batch's own statistics, each layer normalising by the batch
"""

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.graph.untouched import in_mode
from floorplan.ledger.inputs import arguments
from floorplan.torch_doors import BatchNormNd

MOMENTUM = 0.1
HOW = ("ema", "reset")


def calibrate(model: nn.Module, batches: Iterable[Any], how: str = "ema") -> nn.Module:
    """A copy of `model` whose BatchNorms have statistics of `batches`; FloorplanError if there are none.

    batches: inputs of the forward, a tensor or a tuple each. Every BatchNorm with running statistics
    is calibrated, those that stand alone too. The copy keeps the model's mode.
    """
    if how not in HOW:
        raise FloorplanError(f"calibrate {how}: not known; use {', '.join(HOW)}")
    twin = copy.deepcopy(model)
    norms = [m for m in twin.modules() if isinstance(m, BatchNormNd)]
    norms = [m for m in norms if m.running_mean is not None and m.running_var is not None]
    if not norms:
        raise FloorplanError("calibrate: the model has no BatchNorm with running statistics")
    seen = dict.fromkeys(norms, 0)
    with in_mode(twin, "eval"), ExitStack() as hooks, torch.no_grad(), torch.random.fork_rng(devices=[]):
        for m in norms:
            hooks.enter_context(m.register_forward_hook(_update(how, seen)))
            if how == "reset":
                hooks.enter_context(m.register_forward_pre_hook(lambda m, _: setattr(m, "training", True)))
                m.momentum = 0.0  # its own update is left out: ours is of biased variances
        for batch in batches:
            twin(*arguments(batch))
    if not any(seen.values()):
        raise FloorplanError("calibrate: no batch was given, or none reaches a BatchNorm")
    if bad := next((n for n, b in twin.named_buffers() if b.is_floating_point() and not torch.isfinite(b).all()), ""):
        raise FloorplanError(f"calibrate: {bad} is no longer finite; look for NaN or an empty batch")
    originals = dict(model.named_modules())
    for name, part in twin.named_modules():
        if isinstance(part, BatchNormNd):
            part.momentum = cast(Any, originals[name]).momentum
    return twin


def _update(how: str, seen: dict[Any, int]) -> Any:
    def after(m: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        x = args[0].detach()
        axes = [i for i in range(x.dim()) if i != 1]
        mean, var = x.mean(axes), x.var(axes, correction=0)
        seen[m] += 1
        rate = 1 / seen[m] if how == "reset" else MOMENTUM if m.momentum is None else m.momentum
        m.running_mean.lerp_(mean.to(m.running_mean.dtype), rate)
        m.running_var.lerp_(var.to(m.running_var.dtype), rate)
        m.training = False

    return after
