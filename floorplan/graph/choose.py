"""Which convs get an adapter: --sites auto, all, pointwise, or globs over conv paths; and what all insertions do."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ParamSpec

import torch
from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES, is_depthwise, module_calls
from floorplan.graph.fold import call_reason, conv_reason
from floorplan.graph.reach import CUT_OFF, cut_off
from floorplan.layers.adapter import adapters
from floorplan.layers.geometry import geometry_of
from floorplan.layers.layer import Adapter


@dataclass(frozen=True)
class Shape:
    """What the choice looks at in a conv."""

    pointwise: bool
    depthwise: bool
    groups: int
    width: int  # input channels a group


def shape_of(conv: nn.Module) -> Shape:
    """The shape of a conv or a site."""
    geo, inputs = geometry_of(conv), int(conv.in_channels)  # type: ignore[arg-type]
    pointwise = all(k == 1 for k in geo.kernel) and geo.groups == 1
    return Shape(pointwise, is_depthwise(conv), geo.groups, inputs // geo.groups)


@dataclass(frozen=True)
class Insertion:
    """A pass that freezes the model and puts adapters in: its options, and what every such pass does.

    A subclass inserts; calling it runs it.
    """

    rank: int = 2
    sites: str = "auto"  # auto, all, pointwise, or globs over conv paths, comma-separated
    seed: int = 0
    train_head: bool = False

    def __call__(self, gm: fx.GraphModule) -> Iterator[Site]:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise FloorplanError(f"rank {self.rank}: an adapter has a whole rank of 1 or more")
        if not isinstance(self.sites, str):
            raise FloorplanError(f"sites {self.sites}: write a string: auto, all, pointwise, or comma-separated globs")
        found = len(convs_of(gm))
        gm.requires_grad_(False)
        sites = list(self.insert(gm, torch.Generator().manual_seed(self.seed)))
        yield from sites
        if not adapters(gm):
            first = next((f"; {s.node}: {s.refused}" for s in sites if s.refused), "")
            raise FloorplanError(self.nothing(gm, found) + first)
        if self.train_head:
            heads = [m for _, m in module_calls(gm, nn.Linear)]
            if not heads:
                raise FloorplanError("--train-head: the model has no Linear layer; leave the option out")
            heads[-1].requires_grad_(True)

    def insert(self, gm: fx.GraphModule, generator: torch.Generator) -> Iterator[Site]:
        """Put the adapters in; a Site for every place looked at."""
        raise NotImplementedError

    def nothing(self, gm: fx.GraphModule, found: int) -> str:
        """What is said where no adapter was put in, of `found` convs."""
        calls = (n for n in gm.graph.nodes if n.op == "call_function")
        functional = next((n for n in calls if "conv" in getattr(n.target, "__name__", "")), None)
        if not found and functional:
            why = "(weight standardisation, a reparametrization); bake the weight first"
            return f"no conv can be adapted: {functional} convolves with a computed weight {why}"
        advice = "try --sites all or a smaller rank" if found else "its graph has no conv layer"
        return f"no conv was adapted ({found} looked at with --sites {self.sites} --rank {self.rank}); {advice}"

    def choices(self, gm: fx.GraphModule, convs: Mapping[str, nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
        """Path -> why no pass can replace the conv, and of the others: why it was not chosen, "" if it was."""
        plain = {path: m for path, m in convs.items() if not isinstance(m, Adapter)}
        unfit = {path: why for path, m in plain.items() if (why := conv_reason(m) or call_reason(gm, path))}
        dead = cut_off(gm)
        chosen = choose({p: shape_of(m) for p, m in convs.items() if p not in unfit}, self.sites, self.rank)
        return unfit, {path: why or (CUT_OFF if path in dead else "") for path, why in chosen.items()}


P = ParamSpec("P")


def as_pass(name: str, insertion: Callable[P, Insertion]) -> Callable[P, Pass]:
    """What makes the pass of that name from the options of an insertion."""

    def made(*args: P.args, **kwargs: P.kwargs) -> Pass:
        return Pass(name, insertion(*args, **kwargs), tolerance=1e-9)

    return made


def convs_of(gm: fx.GraphModule) -> dict[str, nn.Module]:
    """Path -> every conv or site that the graph calls, in order."""
    calls = module_calls(gm, Adapter, *CONV_TYPES)
    return {str(n.target): m for n, m in calls if not isinstance(m, Adapter) or m.in_channels}


def choose(convs: Mapping[str, Shape], sites: str, rank: int) -> dict[str, str]:
    """Path -> why the conv gets no adapter, "" if it does."""
    chosen = _resolve(convs, sites, rank)
    return {path: _refusal(path, c, chosen, sites, rank) for path, c in convs.items()}


def _resolve(convs: Mapping[str, Shape], sites: str, rank: int) -> str:
    if sites != "auto":
        return sites
    # A ConvNeXt has depthwise convs, but its pointwise layers are Linear; other nets have grouped convs alone.
    kinds = ["ungrouped", "all"]
    if any(c.depthwise for c in convs.values()):
        kinds.insert(0, "pointwise")
    some = (kind for kind in kinds if any(not _refusal("", c, kind, sites, rank) for c in convs.values()))
    return next(some, "ungrouped")


def _refusal(path: str, conv: Shape, chosen: str, sites: str, rank: int) -> str:
    if conv.depthwise:
        return "depthwise: one input channel a group, so q would be as wide as the input"
    if chosen == "pointwise" and not conv.pointwise:
        return "not a pointwise conv"
    if chosen == "ungrouped" and conv.groups > 1:
        return f"grouped ({conv.groups} groups); --sites all adapts it too"
    globs = chosen not in ("pointwise", "ungrouped", "all")
    if globs and not any(fnmatchcase(path, g.strip()) for g in chosen.split(",")):
        return f"not matched by --sites {chosen}"
    # At rank == width q is as big as the input: never chosen by itself, but a user may ask for it.
    if rank > conv.width or (sites == "auto" and rank == conv.width):
        return f"rank {rank} is no smaller than its input width {conv.width}"
    return ""
