"""docs/mutation.md from what benchmarks/mutation.py has found and from why the survivors are no faults."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).parent
RESULTS, REASONS = HERE / "results" / "mutation.json", HERE / "equivalent_mutants.toml"
PAGE = HERE.parent / "docs" / "mutation.md"


def write(results: dict[str, Any]) -> None:
    """The results, whole or not at all."""
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    new.replace(RESULTS)


def survivors(results: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """File, function and change of every survivor."""
    for path, found in results.items():
        for name, f in found["functions"].items():
            yield from ((path, name, change) for change in f["survivors"])


def reason(path: str, name: str, change: str, known: list[dict[str, str]]) -> str:
    """Why a survivor is no fault, by the first entry that fits; "" if none says."""
    for k in known:
        if k["file"] == path and k.get("function", name) == name and k["change"] in change:
            return k["why"]
    return ""


def counts(path: str, functions: dict[str, Any], known: list[dict[str, str]]) -> list[Any]:
    """A row of the table."""
    mutants, died = (sum(f[k] for f in functions.values()) for k in ("mutants", "died"))
    left = [(n, c) for n, f in functions.items() for c in f["survivors"]]
    told = sum(bool(reason(path, n, c, known)) for n, c in left)
    killed = mutants - len(left)
    return [
        path,
        len(functions),
        mutants,
        killed,
        died,
        told,
        len(left) - told,
        f"{100 * killed / max(mutants, 1):.1f} %",
    ]


INTRODUCTION = """\
`python benchmarks/mutation.py` changes the functions of the files where a silent fault would be worst, one small
change at a time (mutmut's operators), and runs the tests that reach the changed statement, the fastest first, 10
seconds of them at most. A mutant is killed when a test fails, hangs or dies. It is every function of each file and
every mutant of it; not changed are annotations, decorators, default values, tables of the module and `strict=` of a
`zip`, and an argument is left out, not replaced by None."""


def text(results: dict[str, Any], known: list[dict[str, str]]) -> str:
    """The page."""
    rows = [counts(p, found["functions"], known) for p, found in results.items()]
    sums = [sum(r[i] for r in rows) for i in range(1, 7)]
    total = ["all", *sums, f"{100 * sums[2] / max(sums[1], 1):.1f} %"]
    heads = ["file", "functions", "mutants", "killed", "of these hung or died", "equivalent", "not explained", "killed"]
    left = [
        [p.rpartition("/")[2], f"`{n}`", f"`{c}`".replace("|", "\\|"), reason(p, n, c, known) or "not explained"]
        for p, n, c in survivors(results)
    ]
    table = tabulate([*rows, total], heads, tablefmt="github")
    reasons = tabulate(left, ["file", "function", "change", "why"], tablefmt="github")
    parts = ("# Mutation testing", INTRODUCTION, table, "## What survived, and why it is no fault", reasons)
    return "\n\n".join(parts) + "\n"


def page() -> None:
    """Write the page."""
    known = tomllib.loads(REASONS.read_text()).get("mutant", []) if REASONS.exists() else []
    PAGE.write_text(text(json.loads(RESULTS.read_text()), known))
