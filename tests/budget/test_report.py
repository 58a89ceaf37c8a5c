"""The report of a plan: as it is printed, its CSV, its document, of rows made by hand."""

import csv
import io
import json
from dataclasses import replace
from typing import Any

from expecttest import assert_expected_inline

from floorplan.budget.report import PlanReport, PlanRow
from floorplan.step.schedule import Schedule

FULL = PlanRow("full fine-tuning", 1024, None, 895_976, 710_160, 20_000, 70_840, 1.0, 8_400_000)
PARTS = PlanRow("micro-batch 4", 1024, 2, 57_672, 14_848, 12_300, 70_840, 6.706, 6_499_000, Schedule(micro_batch=4))
WHOLE = PlanRow("whole batch", 1024, 2, 318_464, 85_376, 12_300, 70_840, None, 6_100_000_000, Schedule())
FOUND = PlanReport(
    "net",
    150_000,
    {"rank": 2},
    (FULL,),
    (PARTS, WHOLE),
    PARTS,
    one_more=152_548,
    batches=(replace(PARTS, batch=8, given=560),),
    measured={"requested_peak": 57_672, "resident_growth": 60_000},
    time_model="by given rates",
    notes=("input inferred",),
)
SCHEDULE = Schedule(micro_batch=4)
PLAIN = PlanRow("full fine-tuning", 16, None, 900, 700, 300, 64, 1.0, 5_000_000)
CHOICE = PlanRow(str(SCHEDULE), 16, 2, 200, 80, 110, 64, 0.7, 3_000_000, SCHEDULE)
REPORT = PlanReport("net", 400, {"rank": 2}, (PLAIN,), (CHOICE,), CHOICE, one_more=420, notes=("said",))


def test_a_plan_as_it_is_printed() -> None:
    assert_expected_inline(
        str(FOUND),
        """\
net: a training step within 150,000 bytes

schedule            batch    requested peak     kept    total    time    MMACs
----------------  -------  ----------------  -------  -------  ------  -------
full fine-tuning     1024           895,976  710,160  986,816    1.00        8
> micro-batch 4      1024            57,672   14,848  140,812    6.71        6
whole batch          1024           318,464   85,376  401,604       -    6,100

bytes; kept: waits for the backward; total: peak + model + optimizer (Adam) + the caller's batch
time: predicted, full fine-tuning of the same batch = 1.00; by given rates

smaller batches, each with its fastest schedule that fits
schedule         batch    requested peak    kept    total    time    MMACs
-------------  -------  ----------------  ------  -------  ------  -------
micro-batch 4        8            57,672  14,848   70,532    6.71        6

choice: batch 1024, rank 2, micro-batch 4
  state 12,300 + batch 70,840 + requested peak 57,672 = 140,812 of 150,000
  one more sample would take 152,548
  measured requested peak 57,672, difference 0
  resident growth 60,000, 1.04 of it (apart)
note: input inferred""",
    )


def test_a_plan_that_nothing_fits_as_markdown() -> None:
    none = replace(FOUND, choice=None, obstacle="raise --budget", batches=(), pareto=(replace(WHOLE, program="4|8"),))
    assert_expected_inline(
        none.markdown(),
        """\
# net, planned

net: a training step within 150,000 bytes

| schedule         |   batch |   requested peak |    kept |   total |   time |   MMACs |
|------------------|---------|------------------|---------|---------|--------|---------|
| full fine-tuning |    1024 |          895,976 | 710,160 | 986,816 |   1.00 |       8 |
| 4\\|8             |    1024 |          318,464 |  85,376 | 401,604 |      - |   6,100 |

bytes; kept: waits for the backward; total: peak + model + optimizer (Adam) + the caller's batch
time: predicted, full fine-tuning of the same batch = 1.00; by given rates

```
nothing fits: raise --budget
```
note: input inferred
""",
    )


def test_a_csv_has_both_tables_and_marks_the_choice() -> None:
    rows = list(csv.DictReader(io.StringIO(FOUND.csv())))
    assert [r["table"] for r in rows] == ["schedules"] * 3 + ["batches"]
    assert [r["schedule"] for r in rows if r["chosen"] == "1"] == ["micro-batch 4"]
    assert [float(r["MMACs"]) for r in rows[:3]] == [8.4, 6.499, 6100.0]
    assert [r["time"] for r in rows[:3]] == ["1.0", "6.706", ""]
    for r in rows:
        assert int(r["total"]) == sum(int(r[k]) for k in ("requested peak", "state", "batch bytes"))


def test_a_row_counts_everything() -> None:
    assert (PLAIN.total, CHOICE.total) == (1264, 374)
    found = CHOICE.as_json()
    assert found["total"] == 374 and found["micro_batch"] == 4 and Schedule.of(found["plan"]) == SCHEDULE
    assert PLAIN.as_json()["micro_batch"] == 16 and PLAIN.as_json()["plan"] is None


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
