"""The timeline of a compiled step: predicted = measured, block by block; what schedules do to the peak."""

from typing import Any

import backbones
import pytest
import torch
from losses import contrastive
from small import Residual
from steps import graph_of, weighted, weights_for

from floorplan.ledger.losses import cross_entropy
from floorplan.ledger.run import Step
from floorplan.ledger.step_figures import step_figures
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.timeline import measure, predict


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(micro_batch=4), Schedule(stages=(("pool", 3),), last=2)])
def test_predicted_is_measured(layout: str, schedule: Schedule) -> None:
    x = torch.randn(9, 3, 12, 12)
    gm = graph_of(Residual(), x).eval()
    plan = Schedule(**{**schedule.as_dict(), "layout": layout})
    step = compile_step(gm, weighted, x, plan=plan, reduction="sum")
    target = weights_for(gm, (x,))
    before = {n: t.clone() for n, t in gm.state_dict().items()}
    p, m = predict(step, (x,), target), measure(step, (x,), target)
    assert p.blocks == m.blocks and p.state == m.state and p.peak > 0
    assert all(torch.equal(t, before[n]) for n, t in gm.state_dict().items())
    assert all(q.grad is None for q in gm.parameters())
    kinds = {b.direction for b in p.blocks}
    assert {"forward", "loss", "backward"} <= kinds
    trained = sum(q.numel() for q in gm.parameters() if q.requires_grad)
    assert sum(b.nbytes for b in p.blocks if b.role == "gradient") == 4 * trained


def test_the_peaks_of_mobilenet() -> None:
    """The byte counts of docs/step_program.md."""
    x, y = torch.randn(64, 1, 97, 60), torch.zeros(64, dtype=torch.int64)
    gm = graph_of(backbones.mobilenet_v2(), x[:2], sites="auto")
    peaks = {
        plan: predict(compile_step(gm, "cross_entropy", x, plan=plan), (x,), y).peak
        for plan in (
            Schedule(),
            Schedule(micro_batch=16),
            Schedule(micro_batch=16, stages=(("features_4_conv_2", 4),), last=16),
        )
    }
    assert list(peaks.values()) == [48_055_172, 12_073_356, 4_297_580]
    assert step_figures(Step(gm, (x,), y, cross_entropy)).requested_peak > 80_000_000


def test_nodes_and_roles() -> None:
    x = torch.randn(4, 3, 12, 12)
    gm = graph_of(Residual(), x).eval()
    step = compile_step(gm, weighted, x, reduction="sum")
    found = predict(step, (x,), weights_for(gm, (x,)))
    packed = [b for b in found.blocks if "pack" in b.op and b.direction == "forward"]
    assert packed and all(b.role == "gate" for b in packed)
    assert {b.role for b in found.blocks} >= {"gate", "adapter", "gradient", "temporary", "output"}
    names = {n.name for n in gm.graph.nodes}
    assert {b.node for b in found.blocks} - {"loss", "region_0", "head", ""} <= names


@pytest.mark.parametrize("batch", [12, 13])
@pytest.mark.parametrize("loss", ["cross_entropy", contrastive])
def test_few_micro_batches_have_the_peak_of_all(batch: int, loss: Any) -> None:
    x, y = torch.randn(batch, 3, 12, 12), torch.zeros(batch, dtype=torch.int64)
    step = compile_step(graph_of(Residual(), x).eval(), loss, x, plan=Schedule(micro_batch=2))
    every, few = predict(step, (x,), y), predict(step, (x,), y, few=True)
    assert few.peak == every.peak and len(few.blocks) < len(every.blocks) and few.state == every.state
