"""plan.json: read back by `rewrite` and compile_step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from floorplan.errors import FloorplanError
from floorplan.step.schedule import Schedule

SCHEMA = "floorplan.plan/1"


def read_plan(plan: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A plan.json, or its document: checked, with a choice in it."""
    if isinstance(plan, str | Path):
        try:
            document = json.loads(Path(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise FloorplanError(f"{plan}: no readable plan ({e}); write one with `floorplan plan --json`") from e
    else:
        document = dict(plan)
    where = str(plan) if isinstance(plan, str | Path) else "plan"
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise FloorplanError(f"{where}: no {SCHEMA} document; write one with `floorplan plan --json`")
    if not isinstance(document.get("choice"), dict):
        raise FloorplanError(f"{where}: nothing fitted its budget, so it has no schedule; plan again with a larger one")
    return document


def schedule_in(plan: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The schedule that a plan.json chose, as plain data."""
    found = read_plan(plan)["choice"].get("plan")
    if not isinstance(found, dict):
        raise FloorplanError("plan: its choice has no schedule; write one with `floorplan plan --json`")
    Schedule.of(found)  # or it says what is wrong
    return found


def options_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """The method's name and its options as a plan.json has them."""
    o = document.get("options")
    kinds = {"method": str, "rank": int, "sites": str, "seed": int, "train_head": bool}
    if not isinstance(o, dict) or any(not isinstance(o.get(k), t) for k, t in kinds.items()):
        raise FloorplanError(f"plan: its options lack one of {', '.join(kinds)}; write it with `floorplan plan --json`")
    return {k: o[k] for k in kinds}
