"""plan.json read back, and what is no plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from floorplan.errors import FloorplanError
from floorplan.methods.catalogue import Options, Plan
from floorplan.step.plan_file import options_in, read_plan, schedule_in

OPTIONS = {"method": "memflora", "rank": 3, "sites": "all", "seed": 5, "train_head": True}
GOOD: dict[str, Any] = {"schema": "floorplan.plan/1", "options": OPTIONS, "choice": {"plan": {"micro_batch": 4}}}


def test_a_file_and_its_document_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    assert read_plan(path) == read_plan(str(path)) == read_plan(GOOD) == GOOD
    assert schedule_in(path) == {"micro_batch": 4}
    assert Plan.of(options_in(GOOD)) == Plan("memflora", Options(3, "all", 5, True))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "no floorplan.plan/1 document"),
        ({"schema": "floorplan.check/1"}, "no floorplan.plan/1 document"),
        (GOOD | {"choice": None}, "nothing fitted its budget"),
        (GOOD | {"choice": {"plan": None}}, "has no schedule"),
    ],
)
def test_what_is_no_plan(document: dict[str, Any], words: str) -> None:
    with pytest.raises(FloorplanError, match=words):
        schedule_in(document)


def test_options_are_checked() -> None:
    for options in (None, OPTIONS | {"rank": "2"}, {k: v for k, v in OPTIONS.items() if k != "seed"}):
        with pytest.raises(FloorplanError, match="its options lack one of method, rank"):
            options_in(GOOD | {"options": options})
    with pytest.raises(FloorplanError, match="method magic: not known"):
        Plan.of(options_in(GOOD | {"options": OPTIONS | {"method": "magic"}}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (broken, tmp_path / "none.json"):
        with pytest.raises(FloorplanError, match="no readable plan"):
            read_plan(path)
