"""Steps under autograd that a plan is held against."""

import pytest
import torch
from plans import MACHINES, model_of

from floorplan.budget.clock import Clock
from floorplan.budget.model import Setting
from floorplan.budget.reference import reference
from floorplan.budget.work import step_work
from floorplan.ledger.inputs import resized
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step
from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Source, subject_of
from floorplan.timeline.run import step_timeline


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_reference_is_the_step_of_fresh_fakes(loss: str) -> None:
    model, x = model_of("residual")
    s = subject_of(Source(model, x))
    gm = adapted(s, Plan("full", Options()), verified=False)[0].gm
    found = reference(Setting(s, None, 0, None, loss, MACHINES, False), gm, 5, "full")
    target = resized(target_for(gm, (x,), loss), 5)
    step = Step(gm, (torch.zeros(5, 3, 16, 16),), target, LOSSES[loss])
    assert found.timeline == step_timeline(step, name="full, batch 5")
    assert found.work == step_work(step) and found.clock == Clock(MACHINES)
    row = found.row(2 * found.seconds)
    assert (row.program, row.batch, row.rank, row.requested_peak, row.time_ratio) == (
        "full",
        5,
        None,
        found.timeline.peak,
        0.5,
    )
    assert (
        row.total == found.timeline.total and row.macs == round(found.work.macs) and found.row(None).time_ratio is None
    )
    assert found.seconds == step_work(step).seconds(Clock(MACHINES)) > 0
