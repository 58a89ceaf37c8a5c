"""Reports: one object a command returns, printed as tables and written as JSON, Markdown or SARIF."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from floorplan.graph.driver import Site
from floorplan.ledger.criterion import AT_FLOOR, UNPROVEN, Entry, Proof
from floorplan.ledger.figures import Figures
from floorplan.ledger.pillars import PILLARS, WHY
from floorplan.render import Cell, Report, Table, difference, nbytes, versions

LABELS = {
    "saved": "saved (distinct storages)",
    "saved_refcount": "saved (once per op)",
    "saved_census": "saved (live storages)",
    "training_state_peak": "training-state peak",
    "requested_peak": "requested peak of the step",
    "total": "total (step + model + optimizer + batch)",
    "trainable_parameters": "trainable parameters",
}
KEPT = ("saved", "saved_refcount", "saved_census")  # what a proof speaks of
TOP = 12  # rows of the tensor table that are printed; the JSON has all


@dataclass(frozen=True)
class CheckReport(Report):
    """What `check` found. `str()` is the printed table, `as_json()` the versioned document."""

    heading = "{.name}, checked"

    name: str
    inputs: tuple[tuple[int, ...], ...]
    proof: Proof
    predicted: Figures
    measured: Figures | None
    notes: tuple[str, ...]
    opaque: dict[str, str]
    lines: dict[str, str]
    subject: str = "as-is"  # or "rewritten", by the log's passes
    rank: int | None = None
    log: dict[str, list[Site]] = field(default_factory=dict)
    method: str | None = None
    mode: str = ""  # that was judged: train, eval or mixed

    @property
    def verdict(self) -> str:
        """AT_FLOOR, ABOVE_FLOOR or UNPROVEN; a measured figure that disagrees disproves a floor."""
        wrong = self.difference is not None and any(self.difference[k] for k in KEPT)
        return UNPROVEN if wrong and self.proof.verdict == AT_FLOOR else self.proof.verdict

    @property
    def exit_code(self) -> int:
        """0 at the floor, 1 otherwise."""
        return 0 if self.verdict == AT_FLOOR else 1

    @property
    def tensors(self) -> tuple[Entry, ...]:
        """Every saved tensor, model state and caller's inputs included."""
        return self.proof.entries

    @property
    def pillars(self) -> dict[str, dict[str, Any]]:
        """Bytes and formula of each pillar; a storage counts at the tensor that was saved first."""
        found: dict[str, dict[str, Any]] = {}
        seen: set[int] = set()
        for e in self.proof.kept:
            if e.storage not in seen:
                seen.add(e.storage)
                row = found.setdefault(e.pillar, {"bytes": 0, "tensors": 0, "expr": ""})
                row["bytes"] += e.nbytes
                row["tensors"] += 1
                row["expr"] = e.expr if not row["expr"] else _joined(row["expr"], e.expr)
        return {p: found[p] for p in PILLARS if p in found}

    @property
    def difference(self) -> dict[str, int] | None:
        """Predicted less measured, each figure."""
        return difference(self.predicted, self.measured)

    @property
    def refused(self) -> list[tuple[str, Site]]:
        """Places that a pass left alone."""
        return [(name, s) for name, sites in self.log.items() for s in sites if s.refused]

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`, schema floorplan.check/1."""
        proof, method = self.proof, self.method or ("memflora" if self.rank else None)
        batch = self.inputs[0][0] if self.inputs and self.inputs[0] else None
        what = {"schema": "floorplan.check/1", "verdict": self.verdict, "subject": self.subject, "model": self.name}
        how = {"method": method, "rank": self.rank, "batch": batch, "input": [list(i[1:]) for i in self.inputs]}
        how |= {"mode": self.mode}
        rests = {"versions": versions(), "assumptions": list(proof.assumptions), "notes": list(self.notes)}
        predicted = {**self.predicted.as_dict(), "saved_expr": self.saved_expr()}
        measured = self.measured.as_dict() if self.measured else None
        figures = {"predicted": predicted, "measured": measured, "difference": self.difference}
        kept = {"pillars": self.pillars, "tensors": [entry_json(e) for e in self.tensors]}
        row = ("node", "refused", "note")
        passes = {name: [{k: getattr(s, k) for k in row} for s in sites] for name, sites in self.log.items()}
        names = {"symbols": proof.symbols, "layers": proof.layers}
        return {**what, **how, **rests, **names, **figures, **kept, "passes": passes}

    def saved_expr(self) -> str:
        """All kept bytes as one sum."""
        once = {e.storage: e.expr for e in reversed(self.proof.kept)}
        terms = Counter(reversed(once.values()))
        return " + ".join(f"{n}*({t})" if n > 1 else t for t, n in terms.items()) or "0"

    def parts(self) -> Iterator[str | Table]:
        """Figures, pillars and guilty tensors, and the verdict with what it rests on."""
        asked = f"--rank {self.rank}" if self.rank else f"--method {self.method}"
        what = "as it stands" if self.subject == "as-is" else f"as `rewrite {asked}` would adapt it"
        sizes = ", ".join(str(list(i)) for i in self.inputs)
        yield from (f"{self.name} ({what}), in {self.mode} mode, input {sizes}", "")
        yield from (_figures(self), _pillars(self))
        count = len(self.proof.guilty)  # few are printed; a CSV has all tensors, the guilty first
        foot = f"… and {count - TOP} more (--json has all)" if count > TOP else ""
        yield tensor_table(sorted(self.tensors, key=lambda e: e.verdict in ("floor", "apart")), min(count, TOP), foot)
        proof, used = self.proof, {x for e in self.proof.guilty[:TOP] for x in e.width_symbols}
        if names := [f"{n} = {proof.symbols[n]} ({layer})" for n, layer in proof.layers.items() if n in used]:
            yield f"widths: {', '.join(names)}"
        yield from self.rests_on()
        yield f"verdict: {self.verdict}{_verdict_words(self)}"

    def rests_on(self) -> Iterator[str]:
        """Notes and assumptions, a line each."""
        assumed = self.proof.assumptions
        yield from (f"note: {n}" for n in dict.fromkeys(self.notes))
        yield from (f"assumes: {a}" for a in assumed[:8])
        if (more := len(assumed) - 8) > 0:
            yield f"assumes: … and {more} more (--json has all)"


def entry_json(e: Entry) -> dict[str, Any]:
    """One tensor of the JSON."""
    names = "node op module pillar owner dtype bits_per_element storage expr verdict reason fix hidden tensor_bytes"
    row = {n: getattr(e, n) for n in names.split()}
    return {**row, "shape": list(e.shape), "bytes": e.nbytes, "width_symbols": list(e.width_symbols)}


def _joined(total: str, more: str) -> str:
    return f"{total} + {more}" if len(total) < 2000 else total.removesuffix(" + …") + " + …"


def _figures(r: CheckReport) -> Table:
    """One row a figure: predicted, measured, difference."""
    real, rows = r.measured.as_dict() if r.measured else {}, []
    for k, v in r.predicted.as_dict().items():
        shown: Any = int if k == "trainable_parameters" else nbytes
        rows.append([LABELS[k], shown(v), *([shown(real[k]), v - real[k]] if real else [])])
    return Table("figures", ["figure", "predicted", *(["measured", "difference"] if real else [])], rows, (1, 2, 3))


def _pillars(r: CheckReport) -> Table:
    rows = [[p, Cell(v["tensors"], str(v["tensors"])), nbytes(v["bytes"]), WHY[p]] for p, v in r.pillars.items()]
    return Table("pillars", ["pillar", "storages", "kept", "why"], rows, right=(1, 2))


def tensor_table(entries: Sequence[Entry], shown: int, foot: str = "") -> Table:
    """One row a tensor; the first so many are printed, their last columns are not."""
    more = ("module", "owner", "dtype", "bits_per_element", "storage", "expr", "verdict", "fix")
    words = ((e, [e.node, e.op, e.pillar, shape_text(e), nbytes(e.nbytes), e.reason]) for e in entries)
    rows = [[*cells, *(getattr(e, n) for n in more)] for e, cells in words]
    header = [Cell("node", "guilty node"), "op", "pillar", "shape", "bytes", "reason", *more]
    return Table("tensors", header, rows, (4,), foot=foot, shown=shown, columns=6)


def _verdict_words(r: CheckReport) -> str:
    if r.verdict == AT_FLOOR:
        grouped = {e.module: e.reason for e in r.proof.kept if e.reason.startswith("the bottleneck of ")}
        named = "".join(f"; {m} keeps {why}" for m, why in list(grouped.items())[:3])
        more = f", {len(grouped) - 3} more such sites" if len(grouped) > 3 else ""
        return f" (no full-precision saved tensor scales with a layer's width{named}{more})"
    above = sum(e.verdict == "above" for e in r.proof.guilty)
    unproven = len(r.proof.guilty) - above
    words = [f"{above} saved tensors scale with a width"] if above else []
    words += [f"{unproven} could not be proved"] if unproven else []
    words += ["what is measured differs from what is predicted"] if not words and r.measured else []
    return f" ({', '.join(words)})" if words else ""


def shape_text(e: Entry) -> str:
    """[B, C1, H1, W1]"""
    return "[" + ", ".join(e.shape) + "]"
