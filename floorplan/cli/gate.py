"""`floorplan gate`: the models of a pyproject.toml, each held to the floor.

[[tool.floorplan.gate]]
model = "my_pkg.nets:build"     # as on the command line
rank = 2                        # optional: as `rewrite` would adapt it
input = [3, 224, 224]           # optional; {image = [3, 64, 64]} for a dict
batch = 8                       # optional
max_saved = 1_000_000           # optional: bytes kept, at most
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from floorplan import api
from floorplan.errors import FloorplanError
from floorplan.ledger.criterion import AT_FLOOR
from floorplan.ledger.report import CheckReport

_KEYS = {str: "model sites weights mode", int: "rank batch max_saved", list: "input allow", bool: "keep_head"}
KINDS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
OPTIONS = KINDS.keys() - {"model", "input", "max_saved"}  # of floorplan.check
INNER = {"input": int, "allow": str}
WORDS = {str: "a string", int: "a whole number", list: "a list", bool: "true or false"}


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
        raise FloorplanError(f'{path}: has no [[tool.floorplan.gate]] entries; add one with model = "pkg.mod:factory"')
    for entry in entries:
        if fault := _fault(entry):
            raise FloorplanError(f"{path}: gate entry {entry}: {fault}")
    return entries


def _fault(entry: Any) -> str:
    """What is wrong with one entry; "" if it can be checked."""
    if not isinstance(entry, dict) or "model" not in entry:
        return "needs `model`"
    if unknown := entry.keys() - KINDS.keys():
        return f"does not know {', '.join(sorted(unknown))}; it knows {', '.join(sorted(KINDS))}"
    for key, value in entry.items():
        if key == "input" and isinstance(value, dict) and value:
            if all(_fault({"model": "", key: shape}) == "" for shape in value.values()):
                continue
        inner = value if KINDS[key] is list else []
        if type(value) is not KINDS[key] or any(type(v) is not INNER[key] for v in inner):
            return f"`{key}` must be {WORDS[KINDS[key]]}"
    return ""


def run(path: Path, say: Callable[[str], None], really: bool = True) -> list[str]:
    """Check all entries, say one line each and what it rests on, return the models that failed."""
    failed = []
    for e in entries_of(path):
        try:
            ok, line, report = _check(e, really)
        except FloorplanError as error:
            ok, line, report = False, f"cannot be checked: {error}", None
        say(f"{'ok  ' if ok else 'FAIL'} {e['model']}: {line}")
        failed += [] if ok else [e["model"]]
        if report is not None:
            for text in report.rests_on() if ok else [str(report)]:
                say(f"     {text}" if ok else text)
    return failed


def _check(e: dict[str, Any], really: bool) -> tuple[bool, str, CheckReport]:
    shapes = [e["input"]] if "input" in e else None
    report = api.check(e["model"], shapes=shapes, run=really, **{k: v for k, v in e.items() if k in OPTIONS})
    saved, limit = report.predicted.saved, e.get("max_saved")
    said = f"{report.verdict} in {report.mode} mode"
    more = f", more than {limit:,}" if limit is not None and saved > limit else ""
    return report.verdict == AT_FLOOR and not more, f"{said}, {saved:,} bytes kept{more}", report
