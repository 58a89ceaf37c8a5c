"""Guilty tensors as SARIF 2.1.0, for code-scanning views."""

from typing import Any

from floorplan.ledger.criterion import Entry
from floorplan.ledger.report import CheckReport, shape_text
from floorplan.render import versions

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def document(report: CheckReport) -> dict[str, Any]:
    """One result a guilty tensor; the location is the node, or the source line where it is known."""
    rules = [{"id": f"above-floor/{p}"} for p in sorted({e.pillar for e in report.proof.guilty})]
    driver = {"name": "floorplan", "version": versions()["floorplan"], "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(report, e) for e in report.proof.guilty]}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(report: CheckReport, e: Entry) -> dict[str, Any]:
    file, _, line = report.lines.get(e.node, "").rpartition(":")
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": e.module or e.node, "kind": "member"}]}
    if file:
        region = {"startLine": int(line)}
        location["physicalLocation"] = {"artifactLocation": {"uri": file}, "region": region}
    text = f"{e.node} ({e.op}) keeps {shape_text(e)} {e.dtype}, {e.expr} bytes: {e.reason}; {e.fix}"
    level = "error" if e.verdict == "above" else "warning"
    return {"ruleId": f"above-floor/{e.pillar}", "level": level, "message": {"text": text}, "locations": [location]}
