"""What a plan works on: the model adapted at a rank, and what stands beside the step."""

from dataclasses import replace

import pytest
import torch
from plans import MACHINES, model_of
from torch import nn

from floorplan.budget.clock import Clock
from floorplan.budget.model import Setting, model_at, objective, reference, streamed
from floorplan.budget.work import step_work
from floorplan.errors import FloorplanError
from floorplan.ledger.inputs import resized
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step
from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.rewrite import adapted, traced_source
from floorplan.methods.subject import Source, subject_of
from floorplan.timeline.run import step_timeline
from tests.step.test_stream import Inverted

TWO = Plan("memflora", Options(rank=2))


def setting(model: nn.Module, x: torch.Tensor, loss: str = "cross_entropy") -> Setting:
    s = subject_of(Source(model, x))
    return Setting(s, traced_source(s), 1 << 30, None, objective(loss), MACHINES, False)


def test_the_constants_of_a_plan() -> None:
    t = setting(*model_of("residual"))
    m = model_at(t, TWO)
    tensors = [*m.gm.parameters(), *m.gm.buffers()]
    trained = sum(p.nbytes for p in m.gm.parameters() if p.requires_grad)
    assert m.state == sum(v.nbytes for v in tensors) + 2 * trained and trained > 0
    assert m.sample == 4 * 3 * 16 * 16 + 8 and m.room(10**6, 3) == 10**6 - m.state - 3 * m.sample
    assert m.rank == 2 and m.gm.meta["floorplan"]["rank"] == 2
    assert streamed(m, t) is None  # it has no inverted residual


def test_every_rank_starts_from_the_same_traced_source() -> None:
    t = setting(*model_of("residual"))
    assert t.traced is not None
    before = [n.name for n in t.traced.gm.graph.nodes]
    one, two = (model_at(t, replace(TWO, options=Options(rank=r))) for r in (1, 2))
    assert [n.name for n in t.traced.gm.graph.nodes] == before
    ranks = [{m.U.shape[1] for m in g.gm.modules() if hasattr(m, "U")} for g in (one, two)]
    assert ranks == [{1}, {2}] and one.state < two.state


def test_a_model_that_is_adapted_keeps_its_rank() -> None:
    model, x = model_of("residual")
    done = model_at(setting(model, x), TWO)
    s = subject_of(Source(done.gm, x))
    again = model_at(Setting(s, None, 1 << 30, None, objective(), MACHINES, False), Plan("memflora", Options(5)))
    assert again.gm is done.gm and again.rank == 2 and again.state == done.state


def test_inverted_residuals_may_be_streamed() -> None:
    t = setting(Inverted(), torch.randn(2, 3, 24, 20), "sum")
    m = model_at(t, TWO)
    narrow = streamed(m, t)
    assert narrow is not None and narrow.net.stream and narrow.gm is m.gm and narrow.net.studied is m.net.studied
    assert not set(narrow.net.cuts) & narrow.net.wide


def test_nothing_that_trains_is_said() -> None:
    model, x = model_of("residual")
    with pytest.raises(FloorplanError, match="Residual: nothing in it trains; choose other --sites"):
        model_at(setting(model, x), Plan("zero-shot", Options()))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_reference_is_the_step_of_fresh_fakes(loss: str) -> None:
    model, x = model_of("residual")
    s = subject_of(Source(model, x))
    gm = adapted(s, Plan("full", Options()), verified=False)[0].gm
    found = reference(Setting(s, None, 0, None, objective(loss), MACHINES, False), gm, 5, "full")
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
