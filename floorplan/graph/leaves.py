"""Which modules tracing calls as a whole: torch.nn layers, and what must not be looked into."""

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from floorplan.layers.layer import Layer
from floorplan.torch_doors import hooks_of

_NEUTRAL = frozenset(  # methods that a subclass may change without changing what a call computes
    """__init__ __repr__ extra_repr reset_parameters _init_weights train eval state_dict __doc__
    __module__ __annotations__ __qualname__ __constants__ __static_attributes__ __firstlineno__
    __parameters__ __orig_bases__ __annotate_func__ __annotations_cache__ _version""".split()
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Refusal(Exception):
    """Why a module's forward must not be traced through."""


def leaf_reason(m: nn.Module) -> str:
    """Why a module has to be called as a whole, whatever its class; "" if it need not."""
    if isinstance(m, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if parametrize.is_parametrized(m):
        return "its weight is parametrized (torch.nn.utils.parametrize)"
    hooks = hooks_of(m)
    for hook in hooks.get("forward_pre_hooks", ()):
        if (kind := type(hook).__name__) in ("WeightNorm", "SpectralNorm"):
            return f"its weight is recomputed by old-style {kind}"
    for way in ("forward", "backward"):
        if any(kind.startswith(way) for kind in hooks):
            return f"it has {way} hooks"
    if "forward" in m.__dict__ and not isinstance(m, fx.GraphModule):
        return "its forward is patched on the instance"
    return ""


def is_plain_leaf(m: nn.Module) -> bool:
    """Whether a call of m computes what a torch.nn layer (or one of floorplan's) computes."""
    if isinstance(m, Layer):
        return True
    kinds = type(m).__mro__
    base = next(k for k in kinds if k.__module__.startswith(("torch.nn", "torch.ao.nn")))
    if base is nn.Module or isinstance(m, _CONTAINERS):
        return False
    own = {n for k in kinds[: kinds.index(base)] for n in vars(k)} - _NEUTRAL
    return not any(callable(getattr(base, n, None)) for n in own)


class Misfit(TypeError):
    """A module is called with arguments that its forward does not take, as Python itself would say."""


def fits(m: nn.Module, args: Any, kwargs: Any) -> None:
    """Misfit where m's forward does not take these arguments."""
    try:
        takes = inspect.signature(m.forward)
    except (TypeError, ValueError):  # written in C++
        return
    try:
        takes.bind(*args, **kwargs)
    except TypeError as e:
        raise Misfit(f"{type(m).__name__}.forward() {e}") from None
