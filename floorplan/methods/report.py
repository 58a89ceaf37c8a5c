"""The report of `rewrite`: the model before and after, predicted and measured, and what was refused."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from floorplan.graph.driver import Site
from floorplan.ledger.pillars import PILLARS
from floorplan.ledger.report import LABELS, CheckReport, shape_text
from floorplan.render import Cell, Report, Table, versions


@dataclass(frozen=True)
class RewriteReport(Report):
    """The model before and after, what was refused, and what it cost."""

    heading = "{.before.name}, adapted"

    before: CheckReport
    after: CheckReport
    options: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The document beside the adapted file, schema floorplan.rewrite/1."""
        head = {"schema": "floorplan.rewrite/1", "options": self.options, "versions": versions()}
        refused = [{"pass": p, "node": s.node, "reason": s.refused} for p, s in self.after.refused]
        return {**head, "before": self.before.as_json(), "after": self.after.as_json(), "refused": refused}

    def parts(self) -> Iterator[str | Table]:
        """Figures and pillars on both sides, what was left alone, and what is above the floor still."""
        b, a = self.before, self.after
        yield from (_figures(b, a), _pillars(b, a))
        yield Table("left alone", ["pass", "left alone", "because"], _grouped(a.refused))
        rows = [[e.node, e.op, shape_text(e), e.nbytes, e.fix] for e in a.proof.guilty]
        yield Table("above the floor", ["above the floor", "op", "shape", "bytes", "what would remove it"], rows)
        yield from (f"note: {n}" for n in dict.fromkeys((*b.notes, *a.notes)))
        yield f"verdict: {b.verdict} -> {a.verdict}"


def _figures(b: CheckReport, a: CheckReport) -> Table:
    rows: list[list[Any]] = []
    after, real = a.predicted.as_dict(), [r.measured.as_dict() if r.measured else {} for r in (b, a)]
    for k, v in b.predicted.as_dict().items():
        ratio = Cell(after[k] / v, f"{after[k] / v:.4f}") if v else None
        rows.append([LABELS[k], v, real[0].get(k), after[k], real[1].get(k), ratio])
    measured = [Cell(f"measured {side}", "measured") for side in ("before", "after")]
    return Table("figures", ["figure (bytes)", "before", measured[0], "after", measured[1], "ratio"], rows, range(1, 6))


def _pillars(b: CheckReport, a: CheckReport) -> Table:
    kept = [{p: v["bytes"] for p, v in r.pillars.items()} for r in (b, a)]
    rows = [[p, kept[0].get(p, 0), kept[1].get(p, 0)] for p in PILLARS if p in kept[0] or p in kept[1]]
    return Table("pillars", ["pillar", "kept before", "kept after"], rows, (1, 2))


def _grouped(refused: Sequence[tuple[str, Site]]) -> list[list[Any]]:
    """One row a reason: eighteen depthwise convs need no eighteen rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for p, s in refused:
        rows.setdefault((p, s.refused), []).append(s.node)
    few = {k: nodes if len(nodes) <= 3 else [*nodes[:2], f"… ({len(nodes)} places)"] for k, nodes in rows.items()}
    return [[p, Cell(", ".join(rows[p, why]), ", ".join(shown)), why] for (p, why), shown in few.items()]
