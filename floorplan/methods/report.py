"""The report of `rewrite`: the model before and after, predicted and measured, and what was refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from floorplan.graph.driver import Site
from floorplan.ledger.pillars import PILLARS
from floorplan.ledger.report import LABELS, CheckReport, shape_text
from floorplan.text import versions


@dataclass(frozen=True)
class RewriteReport:
    """The model before and after, what was refused, and what it cost."""

    before: CheckReport
    after: CheckReport
    options: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The document beside the adapted file, schema floorplan.rewrite/1."""
        return {
            "schema": "floorplan.rewrite/1",
            "options": self.options,
            "versions": versions(),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "refused": [{"pass": p, "node": s.node, "reason": s.refused} for p, s in self.after.refused],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines("simple"))

    def markdown(self) -> str:
        """The same report as Markdown."""
        return "\n".join([f"# {self.before.name}, adapted", "", *self._lines("github"), ""])

    def _lines(self, style: str) -> list[str]:
        b, a = self.before, self.after
        rows = []
        for k, v in b.predicted.as_dict().items():
            w = a.predicted.as_dict()[k]
            row = [LABELS[k], f"{v:,}", _real(b, k), f"{w:,}", _real(a, k), f"{w / v:.4f}" if v else "-"]
            rows.append(row)
        header = ["figure (bytes)", "before", "measured", "after", "measured", "ratio"]
        align = ["left"] + ["right"] * 5
        out = [tabulate(rows, headers=header, tablefmt=style, colalign=align, disable_numparse=True), ""]
        pillars = [
            [p, f"{b.pillars.get(p, {}).get('bytes', 0):,}", f"{a.pillars.get(p, {}).get('bytes', 0):,}"]
            for p in PILLARS
            if p in b.pillars or p in a.pillars
        ]
        out += [
            tabulate(
                pillars,
                headers=["pillar", "kept before", "kept after"],
                tablefmt=style,
                colalign=["left", "right", "right"],
                disable_numparse=True,
            ),
            "",
        ]
        refused = _grouped(a.refused)
        if refused:
            out += [tabulate(refused, headers=["pass", "left alone", "because"], tablefmt=style), ""]
        if a.proof.guilty:
            rows = [[e.node, e.op, shape_text(e), f"{e.nbytes:,}", e.fix] for e in a.proof.guilty]
            out += [
                tabulate(
                    rows,
                    headers=["above the floor", "op", "shape", "bytes", "what would remove it"],
                    tablefmt=style,
                    disable_numparse=True,
                ),
                "",
            ]
        out += [f"note: {n}" for n in dict.fromkeys((*b.notes, *a.notes))]
        return [*out, f"verdict: {b.verdict} -> {a.verdict}"]


def _grouped(refused: Sequence[tuple[str, Site]]) -> list[list[Any]]:
    """One row a reason: eighteen depthwise convs need no eighteen rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for p, s in refused:
        rows.setdefault((p, s.refused), []).append(s.node)
    return [[p, _named(nodes), reason] for (p, reason), nodes in rows.items()]


def _named(nodes: Sequence[str]) -> str:
    if len(nodes) <= 3:
        return ", ".join(nodes)
    return f"{nodes[0]}, {nodes[1]}, … ({len(nodes)} places)"


def _real(r: CheckReport, key: str) -> str:
    return f"{r.measured.as_dict()[key]:,}" if r.measured else "-"
