"""The planner: what it chooses fits, is measured as predicted, and what does not fit is explained."""

import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from losses import contrastive
from plans import MACHINES, model_of
from small import Inverted
from torch import nn

from floorplan import FloorplanError, load, loss, rewrite, save
from floorplan.budget.plan import bytes_of, plan
from floorplan.budget.report import PlanReport
from floorplan.step.compile import compile_step

BATCH = 13


def made(budget: str | int, **options: Any) -> PlanReport:
    model, x = model_of("residual")
    return plan(model, budget, x, machines=MACHINES, **options)


def test_a_budget_counts_weights_moments_and_the_batch() -> None:
    report = made("200kB", batch=BATCH, measured=True)
    choice = report.choice
    assert choice is not None and report.exit_code == 0
    assert choice.total == choice.state + choice.given + choice.requested_peak <= 200_000
    assert report.module is not None
    trained = sum(p.numel() for p in report.module.parameters() if p.requires_grad)
    everything = [*report.module.parameters(), *report.module.buffers()]
    assert choice.state == sum(t.numel() * t.element_size() for t in everything) + 8 * trained
    assert choice.given == BATCH * (3 * 16 * 16 * 4 + 8)
    assert report.measured == {"requested_peak": choice.requested_peak, "total": choice.total}
    assert report.one_more is not None and report.one_more > 200_000
    assert report.before is not None and report.after is not None
    assert report.after.peak == choice.requested_peak < report.before.peak


def test_without_a_batch_the_largest_is_taken() -> None:
    report = made("200kB")
    assert report.choice is not None and report.choice.total <= 200_000
    one_more = made("200kB", batch=report.choice.batch + 1)
    assert one_more.choice is None and one_more.obstacle is not None
    assert f"lower --batch to {report.choice.batch}" in one_more.obstacle
    assert report.batches and all(r.total <= 200_000 for r in report.batches)


def test_the_largest_rank_that_fits_is_taken() -> None:
    need = needed(made(45_000, batch=8, ranks=(3,)))
    roomy, tight = made(need, batch=8, ranks=(1, 3)), made(need - 1, batch=8, ranks=(1, 3))
    assert roomy.choice is not None and roomy.choice.rank == 3
    assert tight.choice is not None and tight.choice.rank == 1


def needed(report: PlanReport) -> int:
    """The budget that a refusal asks for."""
    return int(str(report.obstacle).split("raise --budget to ")[1].split(" ")[0].replace(",", ""))


def test_what_stands_in_the_way_is_named() -> None:
    nothing = made(1000)
    assert nothing.exit_code == 1 and "weights and optimizer state alone take" in str(nothing.obstacle)
    close = made(60_000, batch=BATCH)
    assert close.choice is None
    assert "the smallest step (micro-batch 1" in str(close.obstacle)
    assert "nothing fits: " in str(close)
    need = needed(close)
    assert made(need, batch=BATCH).choice is not None
    assert made(need - 1, batch=BATCH).choice is None


def test_coupled_samples_leave_the_whole_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU())
    report = plan(model, "2MB", torch.randn(2, 3, 9, 9), batch=4, loss="sum", machines=MACHINES)
    assert report.choice is not None and report.choice.schedule is not None
    assert report.choice.schedule.micro_batch == 0 and not report.choice.schedule.stages
    assert any("normalises by the batch" in n for n in report.notes)


def test_a_plan_feeds_rewrite_and_compile_step(tmp_path: Path) -> None:
    report = made("200kB", batch=BATCH)
    assert report.choice is not None and report.choice.schedule is not None
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(report.as_json()))
    model, x = model_of("residual")
    result = rewrite(model, x, 7, plan=path, measured=False)
    assert result.module.meta["floorplan"]["rank"] == 2
    save(result.module, tmp_path / "adapted.pt")
    again = load(tmp_path / "adapted.pt")
    assert compile_step(again, "cross_entropy", x).schedule == report.choice.schedule
    assert compile_step(again, "cross_entropy", x, plan=str(path)).schedule == report.choice.schedule


@pytest.mark.parametrize("options", [{"loss": "hinge"}, {"batch": 0}, {"ranks": ()}, {"ranks": (0,)}])
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(FloorplanError, match="--loss|--batch"):
        made("1MB", **options)


def test_a_loss_of_the_whole_batch_is_planned_in_two_passes() -> None:
    tight = made(100_000, batch=BATCH, loss=contrastive, target=torch.arange(2), measured=True)
    assert tight.choice is not None and tight.choice.passes == 2 and tight.choice.program.endswith(", two passes")
    assert tight.measured is not None and tight.measured["requested_peak"] == tight.choice.requested_peak
    (note,) = (n for n in tight.notes if "two passes" in n)
    assert note.startswith("the loss is not known to add up over samples: contrastive sees the outputs")
    document = tight.as_json()
    assert document["choice"]["passes"] == 2 and document["options"]["loss"] == "contrastive"
    assert all(r.passes == 1 for r in tight.references)
    roomy = made("1MB", batch=BATCH, loss=contrastive, target=torch.arange(2))
    assert roomy.choice is not None and roomy.choice.passes == 1 and "two passes" not in roomy.choice.program


def test_losses_of_torch_keep_their_options() -> None:
    own = loss("cross_entropy", ignore_index=3, weight=torch.rand(5))
    report = made("150kB", batch=BATCH, loss=own, measured=True)
    assert report.choice is not None and report.choice.passes == 1 and report.measured is not None
    assert report.measured["requested_peak"] == report.choice.requested_peak
    assert report.options["loss"] == "cross_entropy(ignore_index=3, weight=[5], reduction=mean)"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, "loss contrastive: its target is not known; give target=, an example of one"),
        (torch.arange(3), r"target: \[3\] for 2 samples of the inputs; give one row a sample"),
        (torch.tensor(1), "target: has no row"),
    ],
)
def test_a_target_that_is_none(target: Any, words: str) -> None:
    with pytest.raises(FloorplanError, match=words):
        made("1MB", loss=contrastive, target=target)


def test_wide_maps_are_streamed_where_nothing_else_fits() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(2, 3, 24, 20), Inverted()
    report = plan(net, 130_000, x, batch=4, ranks=(1,), machines=MACHINES, measured=True, loss="sum")
    assert report.choice is not None and report.choice.schedule.stream and report.choice.total <= 130_000
    assert report.measured is not None and report.measured["requested_peak"] == report.choice.requested_peak
    less = plan(net, report.choice.total - 1, x, batch=4, ranks=(1,), machines=MACHINES, loss="sum")
    assert less.choice is None and f"{report.choice.total:,}" in str(less.obstacle)


def test_what_is_computed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies onto fakes, questions for rules and programs of a whole plan, real steps for its times included."""
    asked: Counter[str] = Counter()

    def counted(path: str) -> None:
        place, _, name = path.rpartition(".")
        real = getattr(import_module(place), name)

        def door(*args: Any, **kwargs: Any) -> Any:
            asked[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(path, door)

    for path in (
        "ledger.fakes.clone_structure",
        "step.studied.rule_of",
        "step.studied.values_of",
        "budget.net.compiled",
    ):
        counted(f"floorplan.{path}")
    monkeypatch.setattr("floorplan.budget.plan.by_kind", lambda device, seconds: MACHINES)
    monkeypatch.setattr("floorplan.budget.clock.SECONDS", 0.0)
    model, x = model_of("residual")
    report = plan(model, "200kB", x, batch=BATCH, measured=True)
    assert report.choice is not None and report.module is not None and report.measured is not None
    assert asked["clone_structure"] <= 10
    assert asked["rule_of"] == len(report.module.graph.nodes) and asked["values_of"] == 1
    assert asked["compiled"] <= 5  # a profile of each form of the sites, the clock's and the choice
    asked.clear()
    assert plan(model, 46_000, x, batch=8, ranks=(1, 3)).choice is None  # two ranks
    assert asked["values_of"] == 2 and asked["clone_structure"] <= 10 + 4


def test_budgets_are_read() -> None:
    assert bytes_of("32MB") == 32_000_000
    assert bytes_of("32MiB") == 33_554_432 == bytes_of("33554432") == bytes_of(33_554_432)
    assert bytes_of("1.5 kB") == 1500 and bytes_of("32") == 32


@pytest.mark.parametrize("bad", ["lots", "-1MB", "0", "3 parsecs", "", True])
def test_what_is_no_amount_is_refused(bad: str) -> None:
    with pytest.raises(FloorplanError, match="^--budget "):
        bytes_of(bad)
