"""What the tests of passes share: a graph as text, one pass run and checked, a rank-r reference."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from floorplan.graph.driver import Pass, Site, rewrite
from floorplan.layers.fused import FusedConv
from floorplan.methods.verify import Verifier

M = TypeVar("M", bound=nn.Module)


def show(gm: fx.GraphModule, log: Iterable[Site]) -> str:
    """One line a node, with the class of its module; then what was refused or noted."""
    lines = []
    for n in gm.graph.nodes:
        args = ", ".join(map(str, (*n.args, *(f"{k}={v}" for k, v in n.kwargs.items()))))
        name = getattr(n.target, "__name__", str(n.target))
        if n.op == "call_module":
            name = describe(gm.get_submodule(str(n.target)))
        lines.append(f"{n.name} = {name}({args})")
    lines += [f"# {s.node}: {s.refused or s.note}" for s in log if s.refused or s.note]
    return "\n".join(lines)


def describe(m: nn.Module) -> str:
    """Class of a module; a site also tells its rank and its activation."""
    if not isinstance(m, FusedConv):
        return type(m).__name__
    parts = [f"rank={m.rank}"] if m.rank else []
    parts += [type(m.act).__name__] if m.act is not None else []
    return f"FusedConv[{', '.join(parts)}]" if parts else "FusedConv"


def run_passes(model: nn.Module, passes: Sequence[Pass], *inputs: Tensor) -> tuple[fx.GraphModule, list[Site]]:
    """Trace in eval mode, run the passes on a float64 copy, each verified; the last one's log."""
    gm = fx.symbolic_trace(copy.deepcopy(model).eval().double())
    check = Verifier([t.double() for t in inputs])
    after, log = rewrite(gm, passes, check)
    return after, log[passes[-1].name]


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every BatchNorm statistics that a fresh one does not have."""
    g = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for name, low, high in (("running_var", 0.5, 3.0), ("running_mean", -2.0, 2.0)):
                if (t := getattr(m, name)) is not None:
                    t.copy_(torch.rand(t.shape, generator=g) * (high - low) + low)
            if m.affine:
                with torch.no_grad():
                    m.weight.copy_(torch.rand(m.weight.shape, generator=g) * 3 - 1)
                    m.bias.copy_(torch.randn(m.bias.shape, generator=g) * 2)
    return model


def last(m: M) -> M:
    """The module with its weights in channels_last."""
    return cast(Any, m).to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def site_at(gm: nn.Module, path: str) -> FusedConv:
    """The site at a path."""
    m = gm.get_submodule(path)
    assert isinstance(m, FusedConv)
    return m


def kept_bytes(model: nn.Module, *inputs: Any) -> int:
    """Distinct storages handed to autograd, model state and inputs apart (by hooks)."""
    known = [*model.parameters(), *model.buffers(), *(t for t in inputs if isinstance(t, Tensor))]
    own = {t.untyped_storage()._cdata for t in known}
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            seen[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*inputs)
        del out
    return sum(t.untyped_storage().nbytes() for t in seen.values())
