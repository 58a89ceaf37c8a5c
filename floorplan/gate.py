"""`floorplan gate`: the models of a pyproject.toml, each held to the floor.

[[tool.floorplan.gate]]
model = "my_pkg.nets:build"     # as on the command line
rank = 2                        # optional: as `rewrite` would adapt it
input = [3, 224, 224]           # optional
batch = 8                       # optional
max_saved = 1_000_000           # optional: bytes kept, at most
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from floorplan import api
from floorplan.criterion import AT_FLOOR
from floorplan.errors import FloorplanError

KEYS = {"model", "rank", "sites", "input", "batch", "max_saved", "weights", "allow", "mode"}


def entries_of(path: Path) -> list[dict[str, Any]]:
    """The gate's entries; FloorplanError if the file cannot be used."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise FloorplanError(f"{path}: {e.strerror}; name a pyproject.toml") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise FloorplanError(f"{path}: not valid TOML: {e}") from e
    entries = document.get("tool", {}).get("floorplan", {}).get("gate", [])
    if not isinstance(entries, list) or not entries:
        raise FloorplanError(
            f'{path}: has no [[tool.floorplan.gate]] entries; add one with model = "pkg.mod:factory"'
        )
    for entry in entries:
        if not isinstance(entry, dict) or "model" not in entry or entry.keys() - KEYS:
            raise FloorplanError(
                f"{path}: gate entry {entry}: needs `model`, and knows only {', '.join(sorted(KEYS))}"
            )
    return entries


def run(path: Path, say: Callable[[str], None]) -> list[str]:
    """Check all entries, say one line each, return the models that failed."""
    failed = []
    for e in entries_of(path):
        shape = e.get("input")
        report = api.check(
            e["model"], rank=e.get("rank"), sites=e.get("sites", "auto"), batch=e.get("batch"),
            shapes=None if shape is None else [tuple(shape)], weights=e.get("weights"),
            allow=e.get("allow", ()), mode=e.get("mode", "saved"),
        )  # fmt: skip
        too_much = "max_saved" in e and report.predicted.saved > e["max_saved"]
        ok = report.verdict == AT_FLOOR and not too_much
        say(f"{'ok  ' if ok else 'FAIL'} {e['model']}: {report.verdict}, {report.predicted.saved:,} bytes kept"
            + (f", more than {e['max_saved']:,}" if too_much else ""))  # fmt: skip
        if not ok:
            failed.append(e["model"])
            say(str(report))
    return failed
