"""Choose what trains, and nothing else: no layer is replaced.

full   every parameter              bias   the biases of convs and of normalizations
none   nothing (zero-shot)          norm   weights and biases of normalizations
"""

from collections.abc import Callable, Iterator

from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES
from floorplan.graph.reach import cut_off
from floorplan.torch_doors import NormBase

NORMALIZATIONS = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)


def _bias(m: nn.Module) -> list[nn.Parameter]:
    bias = getattr(m, "bias", None) if isinstance(m, (*CONV_TYPES, *NORMALIZATIONS)) else None
    return [bias] if isinstance(bias, nn.Parameter) else []


Choice = Callable[[nn.Module], list[nn.Parameter]]
CHOICES: dict[str, Choice] = {
    "full": lambda m: list(m.parameters(recurse=False)),
    "none": lambda m: [],
    "bias": _bias,
    "norm": lambda m: list(m.parameters(recurse=False)) if isinstance(m, NORMALIZATIONS) else [],
}


def trainable(what: str, head: bool = False) -> Pass:
    """The pass for one of CHOICES; `head` keeps the last Linear layer trainable as well."""

    def run(gm: fx.GraphModule) -> Iterator[Site]:
        gm.requires_grad_(False)
        dead = tuple(f"{path}." for path in cut_off(gm))
        linears = [m for m in gm.modules() if isinstance(m, nn.Linear)]
        for path, m in gm.named_modules():
            chosen = [] if f"{path}.".startswith(dead) else CHOICES[what](m)
            if head and linears and m is linears[-1]:
                chosen = list(m.parameters())
            for p in chosen:
                p.requires_grad_(True)
            if chosen:
                yield Site(path or "model")
        if what != "none" and not any(p.requires_grad for p in gm.parameters()):
            raise FloorplanError(f"method {what}: the model has no such parameter to train")

    return Pass(f"train_{what}", run)
