"""`plan`'s report as it is printed, by given rates."""

import csv
import io

import pytest
import torch
from expecttest import assert_expected_inline
from plans import MACHINES
from small import Residual

from floorplan.budget.plan import plan
from floorplan.budget.report import PlanReport


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
