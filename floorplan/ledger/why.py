"""`floorplan why`: one node, module or container in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from floorplan.errors import FloorplanError
from floorplan.ledger.criterion import Entry
from floorplan.ledger.pillars import WHY
from floorplan.ledger.report import CheckReport, entry_json, shape_text, tensor_table
from floorplan.render import Block, Report, Table, versions

OWNERS = {"kept": "kept for the backward", "state": "a reference to model state", "input": "the caller's input"}


@dataclass(frozen=True)
class Why(Report):
    """What one node, module or container keeps, in words and as its tensors."""

    heading = "{0.model}: {0.name}"

    model: str
    name: str
    lines: tuple[str, ...]
    entries: tuple[Entry, ...] = ()

    def parts(self) -> Iterator[str | Table]:
        """The words; a CSV has the tensors."""
        yield Block("\n".join(self.lines))
        yield tensor_table(self.entries, 0)

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`, schema floorplan.why/1."""
        found = {"words": list(self.lines), "tensors": [entry_json(e) for e in self.entries]}
        return {"schema": "floorplan.why/1", "model": self.model, "name": self.name, "versions": versions(), **found}


def why(report: CheckReport, name: str) -> Why:
    """All that a node or module keeps, and why; FloorplanError names near misses."""
    key = name.replace(".", "_")
    found = [e for e in report.tensors if name in (e.node, e.module) or e.node == key]
    records = [(p, s) for p, sites in report.log.items() for s in sites]
    own = ((p, s) for p, s in records if s.node in (name, key) and (s.refused or s.note))
    said = [f"{s.node}: {p}: {'left alone: ' + s.refused if s.refused else s.note}" for p, s in own]
    if found or said:
        parts = [line for e in found for line in _entry(report, e)]
        return Why(report.name, name, (*parts, *said, *_symbols(report, found)), tuple(found))
    inside = [e for e in report.tensors if e.module.startswith(f"{name}.") and e.owner == "kept"]
    if inside:
        return Why(report.name, name, tuple(_container(report, name, inside)), tuple(inside))
    if any(n == key or n.startswith(f"{key}_") for n in report.lines):
        return Why(report.name, name, (f"{name}: autograd keeps nothing there",))
    known = sorted({e.module or e.node for e in report.tensors} | {s.node for _, s in records})
    near = [k for k in known if key in k.replace(".", "_") or k in name] or known
    hint = f"; try {', '.join(near[:5])}" if near else "; nothing is saved at all"
    raise FloorplanError(f"{name}: no node or module of that name saves a tensor{hint}")


def _entry(report: CheckReport, e: Entry) -> list[str]:
    lines = [
        f"{e.node} ({e.op}) saves a tensor: {OWNERS[e.owner]}",
        f"  shape    {shape_text(e)} {e.dtype}, {e.bits_per_element:g} bits an element",
        f"  bytes    {e.nbytes:,} = {e.expr}",
    ]
    if e.owner == "kept":
        lines += [f"  pillar   {e.pillar}: {WHY[e.pillar]}", f"  verdict  {e.verdict}: {e.reason}"]
        lines += [f"  to do    {e.fix}"] if e.fix else []
    shared = ", ".join(dict.fromkeys(o.node for o in report.tensors if o.storage == e.storage and o is not e))
    return lines + ([f"  shared   the same storage is saved by {shared}"] if shared else [])


def _container(report: CheckReport, name: str, inside: list[Entry]) -> list[str]:
    """One line a tensor; a storage is counted once, at the tensor saved first."""
    once = {e.storage: e.nbytes for e in inside}
    lines = [f"{name} keeps {sum(once.values()):,} bytes in {len(once)} storages:"]
    lines += [f"  {e.node} ({e.op}, {e.pillar}) {e.nbytes:,} = {e.expr}: {e.verdict}" for e in inside]
    return [*lines, *_symbols(report, inside)]


def _symbols(report: CheckReport, entries: list[Entry]) -> list[str]:
    layers, values = report.proof.layers, report.proof.symbols
    used = sorted({x for e in entries for x in e.width_symbols})
    return [f"  where    {n} = {values[n]} (width first seen at {layers[n]})" for n in used]
