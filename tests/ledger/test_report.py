"""`check`'s report as it is printed, and its CSV."""

import csv
import io

import torch
from expecttest import assert_expected_inline
from small import Residual, Smooth

import floorplan
from floorplan.ledger.report import TOP, CheckReport


def printed(report: CheckReport) -> str:
    """The report but for what its proof assumes, which is the proof's to say."""
    return "\n".join(line for line in str(report).splitlines() if not line.startswith("assumes: "))


def test_a_measured_check_as_it_is_printed() -> None:
    report = floorplan.check(Smooth(), torch.randn(2, 3, 16, 16), measured=True)
    assert_expected_inline(
        printed(report),
        """\
Smooth (as it stands), in train mode, input [2, 3, 16, 16]

figure                                      predicted    measured    difference
----------------------------------------  -----------  ----------  ------------
saved (distinct storages)                    12,544 B    12,544 B             0
saved (once per op)                          18,688 B    18,688 B             0
saved (live storages)                        12,544 B    12,544 B             0
training-state peak                          15,232 B    15,232 B             0
requested peak of the step                   37,640 B    37,640 B             0
total (step + model + optimizer + batch)     46,472 B    46,472 B             0
trainable parameters                              224         224             0

pillar        storages      kept  why
----------  ----------  --------  --------------------------------------------------------------------
activation           1  12,544 B  the activation's derivative is computed from its input or its result

guilty node    op    pillar      shape               bytes  reason
-------------  ----  ----------  ---------------  --------  --------------------------------
act            SiLU  activation  [B, C1, H1, W1]  12,544 B  full precision and grows with C1

widths: C1 = 8 (conv)
verdict: ABOVE_FLOOR (1 saved tensors scale with a width)""",
    )


def test_an_adapted_check_as_it_is_printed() -> None:
    report = floorplan.check(Residual(), torch.randn(2, 3, 16, 16), rank=2, sites="all")
    assert_expected_inline(
        printed(report),
        """\
Residual (as `rewrite --rank 2` would adapt it), in train mode, input [2, 3, 16, 16]

figure                                      predicted
----------------------------------------  -----------
saved (distinct storages)                     7,428 B
saved (once per op)                           7,428 B
saved (live storages)                         7,428 B
training-state peak                          19,852 B
requested peak of the step                   39,856 B
total (step + model + optimizer + batch)     58,300 B
trainable parameters                              464

pillar      storages     kept  why
--------  ----------  -------  ----------------------------------------------------------
adapter            3  6,144 B  the up-projection's gradient needs the rank-r bottleneck q
gate               4  1,284 B  one bit an element tells where the gradient passes

verdict: AT_FLOOR (no full-precision saved tensor scales with a layer's width)""",
    )


def test_a_csv_has_all_tensors_and_the_guilty_first() -> None:
    report = floorplan.check(Residual(), torch.randn(2, 3, 16, 16))
    rows = [r for r in csv.DictReader(io.StringIO(report.csv())) if r["table"] == "tensors"]
    guilty = len(report.proof.guilty)
    assert len(rows) == len(report.tensors) > TOP and 0 < guilty < TOP
    assert [r["verdict"] == "above" for r in rows] == [i < guilty for i in range(len(rows))]
    assert sorted(int(r["bytes"]) for r in rows) == sorted(e.nbytes for e in report.tensors)
    assert {r["expr"] for r in rows} == {e.expr for e in report.tensors}
