"""What the tests of passes share: a graph as text, one pass run and checked, a rank-r reference."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any, TypeVar, cast

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from floorplan.graph.driver import Pass, Site, rewrite
from floorplan.layers.fused import FusedConv
from floorplan.layers.paper import PaperSite
from floorplan.methods.verify import Verifier

M = TypeVar("M", bound=nn.Module)


def show(gm: fx.GraphModule, log: Iterable[Site], after: Mapping[str, str] | None = None) -> str:
    """One line a node, with the class of its module and what stands after it; then what was refused or noted."""
    lines = []
    for n in gm.graph.nodes:
        args = ", ".join(map(str, (*n.args, *(f"{k}={v}" for k, v in n.kwargs.items()))))
        name = getattr(n.target, "__name__", str(n.target))
        if n.op == "call_module":
            name = describe(gm.get_submodule(str(n.target)))
        lines.append(f"{n.name} = {name}({args})" + (after or {}).get(n.name, ""))
    lines += [f"# {s.node}: {s.refused or s.note}" for s in log if s.refused or s.note]
    return "\n".join(lines)


def describe(m: nn.Module) -> str:
    """Class of a module; one that stands for an activation or takes one in tells it, and a rank if it has one."""
    rank, act = getattr(m, "rank", 0), getattr(m, "act", None)
    parts = [f"rank={rank}"] if rank and isinstance(m, FusedConv | PaperSite) else []
    parts += [type(act).__name__] if isinstance(act, nn.Module) else []
    return f"{type(m).__name__}[{', '.join(parts)}]" if parts else type(m).__name__


class _Saves(fx.Interpreter):
    """Runs a graph and writes down what each node trains and hands to autograd."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.after: dict[str, str] = {}
        state = (*gm.parameters(), *gm.buffers())
        self.known = {t.untyped_storage()._cdata: "" for t in state}  # a name, "" for model state
        self.held: list[Any] = list(state)  # or a freed key could be given to another tensor

    def run_node(self, n: fx.Node) -> Any:
        found: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            found.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            value = super().run_node(n)
        self.held.append((value, found))
        for t in tree_leaves(value):
            if isinstance(t, Tensor):
                self.known.setdefault(t.untyped_storage()._cdata, n.name)
        names = [(self.known.get(t.untyped_storage()._cdata, _dtype(t)), t) for t in found if t.numel()]
        own, kept = _trained(self.module, n), [f"{name}{list(t.shape)}" for name, t in names if name]
        self.after[n.name] = f"  trains {', '.join(own)}" if own else ""
        self.after[n.name] += f"  saves {', '.join(kept)}" if kept else ""
        return value


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _trained(gm: nn.Module, n: fx.Node) -> list[str]:
    """Names of the parameters of a node's module that train."""
    m = gm.get_submodule(str(n.target)) if n.op == "call_module" else nn.Module()
    return [name for name, p in m.named_parameters() if p.requires_grad]


def picture(gm: fx.GraphModule, log: Iterable[Site], *inputs: Tensor) -> str:
    """`show`, and after each node what trains in it and what it saves: whose value or dtype, and shape."""
    run = _Saves(gm)
    dtype = next((p.dtype for p in (*gm.parameters(), *gm.buffers()) if p.is_floating_point()), torch.float32)
    run.run(*(t.to(dtype) for t in inputs))
    lines = show(gm, log, run.after).splitlines()
    return "\n".join(fill(line, 112, subsequent_indent="    ", break_on_hyphens=False) for line in lines)


def golden(passes: Sequence[Pass], model: nn.Module, x: Tensor, want: str) -> None:
    """The passes, verified, make this picture; EXPECTTEST_ACCEPT=1 writes it into the test."""
    assert_expected_inline(picture(*run_passes(model, passes, x), x), want, skip=1)


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
