"""The zoo's results as tables: one a family, with totals and what did not work."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

HEADER = [
    "model",
    "saved before (MB)",
    "after (MB)",
    "ratio",
    "verdict",
    "saved above the floor",
    "predicted = measured",
    "difference at start",
    "own rounding",
]
VERDICTS = ("AT_FLOOR", "ABOVE_FLOOR", "UNPROVEN")
ALIGN = ["left", "right", "right", "right", "left", "left", "left", "right", "right"]


def exact(row: dict[str, Any]) -> bool:
    """Whether every comparison was made and every figure agreed."""
    return bool(row["checks"]) and not row["unequal"] and not row["error"]


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    state = row["error"] or "; ".join(row["unequal"]) or f"{row['checks']} checks exact"
    parts = [f"{row['family']} {row['name']} ({row['seconds']:.0f} s)", state, row["verdict_after"]]
    if row["opaque"]:
        parts.append("not traced: " + ", ".join(list(row["opaque"])[:3]))
    return " | ".join(p for p in parts if p)


def page(document: dict[str, Any]) -> str:
    """The whole page, Markdown."""
    rows = document["rows"]
    families = list(dict.fromkeys(r["family"] for r in rows))
    out = [*_head(document), "", _totals(families, rows), ""]
    for family in families:
        own = [r for r in rows if r["family"] == family]
        cells = [_cells(r) for r in own]
        table = tabulate(cells, HEADER, "github", colalign=ALIGN, disable_numparse=True)
        out += [f"## {family}", "", table, ""]
        out += _troubles(own)
    return "\n".join(out).rstrip()


def _head(document: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{n} {v}" for n, v in document["versions"].items())
    small = all(r["family"] == "timm-more" for r in document["rows"])
    option = " --family timm-more" if small else ""
    sizes = (
        ("batch 2 and", "the smallest images of 64 and more pixels a side that the model takes, in 1e6.")
        if small
        else ("batch 8 and", "224x224 images (299x299 for inception_v3; the examples at their own size), in 1e6.")
    )
    return [
        "# The zoo",
        "",
        f"Made by `python benchmarks/zoo.py{option}` ({versions}, CPU, float32); do not edit.",
        "",
        "Weights and BatchNorm statistics are random. Before the rewrite (MemFLoRA at rank",
        f"{document['rank']}, `--sites auto`) every parameter is trainable.",
        "",
        f"- *saved before, after*: predicted bytes that autograd keeps in a step at {sizes[0]}",
        f"  {sizes[1]}",
        "- *saved above the floor*: ops whose saved tensors still grow with a layer's width after",
        "  the rewrite, with the number of tensors.",
        "- *predicted = measured*: eight comparisons a model, on small images, by `floorplan.rewrite`",
        "  and `floorplan.check`: before and after, as created and in eval mode, at batch 2 and 3.",
        "  In each, every figure of `check` must equal a real run's to the byte, and",
        "  the real run's hooks its census of live storages.",
        "- *difference at start*: largest output difference between the adapted and the source",
        "  model in eval mode, over the largest output; *own rounding*: the same of the source",
        "  model alone, its inputs and weights moved by one unit in the last place.",
    ]


def _totals(families: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for name in [*families, "all"]:
        own = [r for r in rows if name in (r["family"], "all")]
        counts = [len(own), sum(exact(r) for r in own)]
        counts += [sum(r["verdict_after"] == v for r in own) for v in VERDICTS]
        lines.append([name, *counts, sum(bool(r["error"]) for r in own)])
    header = ["family", "models", "exact", *VERDICTS, "failed"]
    return str(tabulate(lines, header, "github"))


def _cells(r: dict[str, Any]) -> list[str]:
    before, after = r["saved_before"], r["saved_after"]
    verdicts = [v for v in (r["verdict_before"], r["verdict_after"]) if v]
    guilty = [f"{op} x{n}" for op, n in r["guilty"].items()]
    more = [f"{len(guilty) - 4} more"] if len(guilty) > 4 else []
    start = r["init_difference"]
    return [
        r["name"],
        "-" if before is None else f"{before / 1e6:.3f}",
        "-" if after is None else f"{after / 1e6:.3f}",
        f"{after / before:.4f}" if before and after is not None else "-",
        " -> ".join(verdicts) or "-",
        ", ".join(guilty[:4] + more),
        "failed" if r["error"] else "yes" if exact(r) else "NO",
        "-" if start is None else f"{start:.1e}",
        "-" if (own := r.get("own_difference")) is None else f"{own:.1e}",
    ]


def _troubles(rows: Sequence[dict[str, Any]]) -> list[str]:
    out = [f"- `{r['name']}` failed at {_code(r['error'])}" for r in rows if r["error"]]
    out += [f"- `{r['name']}` differs, {_code(u)}" for r in rows for u in r["unequal"]]
    out += [f"- `{r['name']}`: {path} was not traced: {_code(why)}" for r in rows for path, why in r["opaque"].items()]
    out += [
        f"- `{r['name']}`: {_code(note)}"
        for r in rows
        for note in dict.fromkeys((*r["notes_before"], *r["notes_after"]))
    ]
    return [*out, ""] if out else []


def _code(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")
