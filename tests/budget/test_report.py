"""The report of a plan: as it is printed, by given rates; what its rows add up to, its text and its document."""

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from plans import MACHINES
from small import Residual

from floorplan.budget.plan import plan
from floorplan.budget.report import PlanReport, PlanRow
from floorplan.step.compile import Schedule

PARTS = Schedule(micro_batch=4)
FULL = PlanRow("full fine-tuning", 16, None, 900, 700, 300, 64, 1.0, 5_000_000)
CHOICE = PlanRow(str(PARTS), 16, 2, 200, 80, 110, 64, 0.7, 3_000_000, PARTS)
REPORT = PlanReport("net", 400, {"rank": 2}, (FULL,), (CHOICE,), CHOICE, one_more=420, notes=("said",))


@pytest.fixture(scope="module")
def found() -> PlanReport:
    return plan(Residual(), "100kB", torch.randn(2, 3, 16, 16), machines=MACHINES)


def test_a_plan_as_it_is_printed(found: PlanReport) -> None:
    assert_expected_inline(
        str(found),
        """\
Residual: a training step within 100,000 bytes

schedule                                batch    requested peak     kept    total    time    MMACs
------------------------------------  -------  ----------------  -------  -------  ------  -------
full fine-tuning                           23           895,976  710,160  986,764    1.00        8
adapted, autograd, whole batch             23           432,724   85,886  515,864    1.32        6
> micro-batch 1, 2 sites as branches       23            16,328    3,712   99,468   20.41        7
micro-batch 1, 3 sites as branches         23            23,944    3,712  107,084   19.27        8
micro-batch 2, 2 sites as branches         23            29,512    7,424  112,652   11.62        7
micro-batch 2, 3 sites as branches         23            37,256    7,424  120,396   11.40        8
micro-batch 4, 2 sites as branches         23            57,160   14,848  140,300    6.87        7
micro-batch 4                              23            57,672   14,848  140,812    6.71        6
micro-batch 8, 2 sites as branches         23           112,452   29,696  195,592    4.59        7
micro-batch 8                              23           112,964   29,696  196,104    4.08        6
micro-batch 16, 2 sites as branches        23           221,184   59,392  304,324    3.23        7
micro-batch 16                             23           221,696   59,392  304,836    2.85        6
whole batch, 2 sites as branches           23           317,952   85,376  401,092    1.95        7
whole batch                                23           318,464   85,376  401,604    1.67        6

bytes; kept: waits for the backward; total: peak + model + optimizer (Adam) + the caller's batch
time: predicted, full fine-tuning of the same batch = 1.00; by given rates; no real step was run to check them

smaller batches, each with its fastest schedule that fits
schedule                              batch    requested peak    kept    total    time    MMACs
----------------------------------  -------  ----------------  ------  -------  ------  -------
micro-batch 4                             8            57,668  14,848   94,608    6.49        2
micro-batch 2, 3 sites as branches       16            37,256   7,424   98,836   11.04        6

choice: batch 23, rank 2, micro-batch 1, 2 sites as branches
  state 12,300 + batch 70,840 + requested peak 16,328 = 99,468 of 100,000
  one more sample would take 102,548""",
    )


def test_a_csv_has_both_tables_and_marks_the_choice(found: PlanReport) -> None:
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [r["table"] for r in rows].count("batches") == len(found.batches) > 0
    chosen = [r for r in rows if r["chosen"] == "1"]
    assert found.choice is not None and [r["schedule"] for r in chosen] == [found.choice.program]
    for r in rows:
        assert int(r["total"]) == sum(int(r[k]) for k in ("requested peak", "state", "batch bytes"))


def test_a_row_counts_everything() -> None:
    assert (FULL.total, CHOICE.total) == (1264, 374)
    found = CHOICE.as_json()
    assert found["total"] == 374 and found["micro_batch"] == 4 and Schedule.of(found["plan"]) == PARTS
    assert FULL.as_json()["micro_batch"] == 16 and FULL.as_json()["plan"] is None


def test_the_text_of_a_choice() -> None:
    text = str(replace(REPORT, measured={"requested_peak": 200, "resident_growth": 500}))
    assert "net: a training step within 400 bytes" in text and f"> {CHOICE.program}" in text
    assert f"choice: batch 16, rank 2, {CHOICE.program}" in text
    assert "state 110 + batch 64 + requested peak 200 = 374 of 400" in text
    assert "one more sample would take 420" in text and "measured requested peak 200, difference 0" in text
    assert "resident growth 500, 2.50 of it" in text and text.endswith("note: said")
    assert "smaller batches" not in text and "smaller batches" in str(replace(REPORT, batches=(CHOICE,)))


def test_nothing_fits() -> None:
    none = replace(REPORT, choice=None, obstacle="too small")
    assert none.exit_code == 1 and REPORT.exit_code == 0
    assert "nothing fits: too small" in str(none)
    assert none.as_json()["choice"] is none.as_json()["difference"] is None


def test_the_document() -> None:
    found: dict[str, Any] = json.loads(json.dumps(replace(REPORT, measured={"requested_peak": 190}).as_json()))
    assert found["schema"] == "floorplan.plan/1" and found["difference"] == {"requested_peak": 10}
    assert found["choice"] == found["pareto"][0] and found["references"][0]["schedule"] == "full fine-tuning"
    assert (found["budget"], found["one_more"], found["notes"]) == (400, 420, ["said"])
