"""`floorplan why`: one node in words."""

from floorplan.errors import FloorplanError
from floorplan.pillars import WHY
from floorplan.report import CheckReport


def why(report: CheckReport, name: str) -> str:
    """All that a node or module keeps, and why; FloorplanError names near misses."""
    key = name.replace(".", "_")
    found = [e for e in report.tensors if name in (e.node, e.module) or e.node == key]
    refusals = [(p, s) for p, sites in report.log.items() for s in sites
                if s.node in (name, key) and (s.refused or s.note)]  # fmt: skip
    if not found and not refusals:
        known = sorted(
            {e.module or e.node for e in report.tensors}
            | {s.node for v in report.log.values() for s in v}
        )
        near = [k for k in known if key in k.replace(".", "_") or k in name][:5]
        hint = (
            f"near it: {', '.join(near)}"
            if near
            else f"try {', '.join(known[:5])}"
            if known
            else "nothing is saved at all"
        )
        raise FloorplanError(f"{name}: no tensor is saved there; {hint}")
    lines: list[str] = []
    for e in found:
        owner = {
            "kept": "kept for the backward",
            "state": "a reference to model state",
            "input": "the caller's input",
        }[e.owner]
        lines += [
            f"{e.node} ({e.op}) saves a tensor: {owner}",
            f"  shape    [{', '.join(e.shape)}] {e.dtype}, {e.bits_per_element:g} bits an element",
            f"  bytes    {e.nbytes:,} = {e.expr}",
        ]
        if e.owner == "kept":
            lines += [
                f"  pillar   {e.pillar}: {WHY[e.pillar]}",
                f"  verdict  {e.verdict}: {e.reason}",
            ]
            lines += [f"  to do    {e.fix}"] if e.fix else []
        shared = [o.node for o in report.tensors if o.storage == e.storage and o is not e]
        lines += (
            [f"  shared   the same storage is saved by {', '.join(dict.fromkeys(shared))}"]
            if shared
            else []
        )
    for p, s in refusals:
        lines.append(f"{s.node}: {p}: {'left alone: ' + s.refused if s.refused else s.note}")
    used = {x for e in found for x in e.width_symbols}
    lines += [
        f"  where    {n} = {report.proof.symbols[n]} (width first seen at {report.proof.layers[n]})"
        for n in sorted(used)
    ]
    return "\n".join(lines)
