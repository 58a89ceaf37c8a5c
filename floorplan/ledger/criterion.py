"""The verdict: does any full-precision saved tensor scale with a layer's width?

A kept tensor passes only if its size is positively B * r * positions (times g in a site with g groups),
or has neither batch nor position in it, or is a packed gate or pool offset. A width that the run pinned
to a number proves nothing: UNPROVEN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import sympy
import torch
from torch import fx

from floorplan.layers.layer import Adapter
from floorplan.ledger import pillars
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.names import Namer
from floorplan.ledger.recorder import Saved
from floorplan.ledger.run import Run

AT_FLOOR, ABOVE_FLOOR, UNPROVEN = "AT_FLOOR", "ABOVE_FLOOR", "UNPROVEN"


@dataclass(frozen=True)
class Entry:
    """One saved tensor of the ledger, in the reader's words."""

    node: str
    op: str
    module: str
    pillar: str
    owner: str  # state, input, kept
    shape: tuple[str, ...]
    dtype: str
    bits_per_element: float
    storage: int
    nbytes: int  # of the whole storage, at the sizes asked for
    tensor_bytes: int
    expr: str  # nbytes as a formula
    size: sympy.Expr  # the same, to be evaluated at other sizes
    width_symbols: tuple[str, ...]
    verdict: str  # floor, above, unproven, apart (model state and caller's inputs)
    reason: str
    fix: str
    hidden: bool = False


@dataclass(frozen=True)
class Proof:
    """All entries, and what they amount to."""

    verdict: str
    entries: tuple[Entry, ...]
    symbols: dict[str, int]
    layers: dict[str, str]
    assumptions: tuple[str, ...]

    @property
    def kept(self) -> list[Entry]:
        """Entries that are neither model state nor a caller's input."""
        return [e for e in self.entries if e.owner == "kept"]

    @property
    def guilty(self) -> list[Entry]:
        """Entries that keep the model from the floor."""
        return [e for e in self.kept if e.verdict in ("above", "unproven")]


def prove(gm: fx.GraphModule, fakes: Fakes, run: Run, opaque: Mapping[str, str]) -> Proof:
    """Turn a symbolic run into a ledger and a verdict."""
    namer = Namer(fakes)
    entries = tuple(_entry(s, gm, namer, opaque) for s in run.saved if namer.expr(s.nbytes) != 0)
    kinds = {e.verdict for e in entries if e.owner == "kept"}
    unproven = "unproven" in kinds or any(v.startswith("B ") for v in namer.pinned)
    verdict = ABOVE_FLOOR if "above" in kinds else UNPROVEN if unproven else AT_FLOOR
    return Proof(verdict, entries, namer.values(), namer.layers, namer.assumptions())


def _entry(s: Saved, gm: fx.GraphModule, namer: Namer, opaque: Mapping[str, str]) -> Entry:
    size, shape = namer.expr(s.nbytes), [namer.expr(d) for d in s.shape]
    packed, same = is_packed(s), ("node", "op", "module", "owner", "storage", "hidden")
    if (plain := namer.product(size, shape, s.dtype.itemsize)) is not None:
        size = plain
    verdict, reason = _judge(s, gm, namer, size, shape, opaque)
    return Entry(
        **{name: getattr(s, name) for name in same},
        pillar=pillars.pillar_of(s, gm, packed),
        shape=tuple(namer.show(d) for d in shape),
        dtype=str(s.dtype).removeprefix("torch."),
        bits_per_element=pillars.packed_bits(s, gm) if packed else 8.0 * s.dtype.itemsize,
        nbytes=namer.at(size),
        tensor_bytes=namer.at(namer.expr(s.tensor_bytes)),
        expr=namer.formula(size, shape, s.dtype.itemsize),
        size=size,
        width_symbols=tuple(sorted(x.name for x in size.free_symbols if namer.is_width(x))),
        verdict=verdict,
        reason=reason,
        fix="" if verdict in ("floor", "apart") else pillars.fix_for(s, gm),
    )


def _judge(
    s: Saved, gm: fx.GraphModule, namer: Namer, size: sympy.Expr, shape: list[sympy.Expr], opaque: Mapping[str, str]
) -> tuple[str, str]:
    if s.owner != "kept":
        return "apart", "model state" if s.owner == "state" else "the caller's input"
    free = size.free_symbols
    varying = [x for x in free if namer.is_batch(x) or namer.is_position(x)]
    widths = sorted(x.name for x in free if namer.is_width(x))
    where = "hidden from save_for_backward, found by the census; " if s.hidden else ""
    if is_packed(s) and getattr(pillars.layer_of(s, gm), "lossy", False):
        return "floor", f"LOSSY: {pillars.packed_bits(s, gm):g} bits an element of an approximate derivative"
    if is_packed(s):
        return "floor", "packed to at most 8 bits an element"
    if is_workspace(s):
        return "unproven", "a workspace of the fused LSTM: its size is measured, not derived"
    if not varying and (namer.positions_known or _a_width(shape, namer)):
        return "floor", "independent of batch and positions"
    if not varying:
        return "unproven", f"{where}positions are plain numbers, so whether it grows with them is unknown"
    if widths:
        return "above", f"{where}full precision and grows with {', '.join(widths)}"
    if s.module in opaque:
        return "unproven", f"{where}inside {s.module}, which was not traced: {opaque[s.module]}"
    if _is_bottleneck(s, gm, namer, shape):
        return _bottleneck(cast(Adapter, pillars.layer_of(s, gm)), where)
    if lost := [p for p in namer.pinned_widths if shape[1:2] == [sympy.Integer(namer.pinned_widths[p])]]:
        return "above", f"{where}full precision and as wide as {lost[0]}, which the model ties to a number"
    return "unproven", f"{where}a plain number stands where a width is expected: a width was pinned"


def _a_width(shape: list[sympy.Expr], namer: Namer) -> bool:
    """Whether a size is a number alone or one value a channel, whatever the positions are."""
    if len(shape) != 1:
        return not shape
    pinned = {1, *namer.pinned_widths.values()}
    return bool(namer.is_width(shape[0]) if shape[0].is_Symbol else shape[0] in pinned)


def is_packed(s: Saved) -> bool:
    """Whether a tensor holds bits that an op of ours has packed."""
    return s.dtype == torch.uint8 and s.maker.startswith("floorplan.")


def is_workspace(s: Saved) -> bool:
    """Whether a tensor is the fused LSTM's own scratch, in a format that oneDNN chooses."""
    return s.maker.startswith("aten.mkldnn_rnn_layer") and s.dtype == torch.uint8


def _is_bottleneck(s: Saved, gm: fx.GraphModule, namer: Namer, shape: list[sympy.Expr]) -> bool:
    """q of a site: exactly B, then r (times the site's groups), then positions alone."""
    groups = pillars.site_groups(s, gm)
    if groups is None or len(shape) < 3:
        return False
    positions = all(namer.is_position(x) for d in shape[2:] for x in d.free_symbols)
    batch, rank = namer.batch, namer.rank
    return bool(shape[0] == batch and rank is not None and shape[1] == groups * rank and positions)


def _bottleneck(site: Adapter, where: str) -> tuple[str, str]:
    """What a q of groups * r channels is: as wide as the map it stands for, it is no bottleneck."""
    groups = 1 if site.geo is None else site.geo.groups
    wide, said = groups * site.rank, f"{groups} groups of rank {site.rank}" if groups > 1 else f"rank {site.rank}"
    if 0 < site.in_channels <= wide:
        return "above", f"{where}full precision, no bottleneck: {said}, as wide as the {site.in_channels} inputs"
    return "floor", "the rank-r bottleneck" if groups == 1 else f"the bottleneck of {said}"
