"""Prediction as a whole: exact figures with a proof beside them, however symbolic the sizes can be."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hard_models import HARD, build
from hard_nets import Lambda, Norm, block2, pair, same
from kinds import images
from torch import Tensor, nn

import floorplan
from floorplan.errors import TraceError
from floorplan.graph.trace import trace
from floorplan.ledger.analyze import analyze, trainable
from floorplan.ledger.criterion import ABOVE_FLOOR, AT_FLOOR, UNPROVEN
from floorplan.ledger.figures import measure
from floorplan.ledger.run import Step, Watch, run


def test_proof_and_figures_agree() -> None:
    model, x = Lambda(block2, **pair(8)), images()
    found = analyze(trace(model, (x,)).gm, (x,))
    assert found.proof.verdict == ABOVE_FLOOR and found.notes == ()
    assert sum({e.storage: e.nbytes for e in found.proof.kept}.values()) == found.figures.saved
    assert found.figures == measure(model, (x,))


def test_no_data_is_needed() -> None:
    model, x = Lambda(block2, **pair(8)), images()
    nan = torch.full_like(x, float("nan"))
    gm = trace(model, (x,)).gm
    assert analyze(gm, (x,)).figures == analyze(gm, (nan,)).figures


def test_a_head_that_fixes_the_size_is_said() -> None:
    def run(m: Lambda, x: Tensor) -> Any:
        return m.fc(F.silu(m.c1(x)).flatten(1))

    model, x = Lambda(run, c1=same(3, 8), fc=nn.Linear(8 * 144, 4)), images()
    found = analyze(trace(model, (x,)).gm, (x,))
    assert found.proof.verdict == ABOVE_FLOOR
    assert found.figures == measure(model, (x,))


def test_what_cannot_be_proved_is_not_at_the_floor() -> None:
    model, x = Lambda(lambda m, x: m.c1(x).sum(1).reshape(4, 144).sigmoid(), c1=same(3, 8)), images()
    found = analyze(trace(model, (x,)).gm, (x,))
    assert found.proof.verdict == UNPROVEN
    assert found.notes[0].startswith("not proved: reshape") and "\n" not in found.notes[0]
    assert found.figures == measure(model, (x,))


def test_the_lstm_workspace_is_measured_and_not_proved() -> None:
    model, inputs = build("conv-lstm")
    found = analyze(trace(model, inputs).gm, inputs)
    workspaces = [e for e in found.proof.kept if "workspace" in e.reason]
    assert len(workspaces) == 2 and all(e.verdict == "unproven" for e in workspaces)
    assert found.figures.saved == HARD["conv-lstm"].train[0]


def test_trainable_is_silent_on_sound_models() -> None:
    model, inputs = build("projected-residual")
    trainable(trace(model, inputs).gm, inputs)


def test_a_double_in_place_write_is_diagnosed() -> None:
    def run(m: Lambda, x: Tensor) -> Any:
        y = torch.tanh(m.c1(x))
        return m.c2(y.add_(1))

    model, x = Lambda(run, c1=same(3, 8), c2=same(8, 4)), images()
    with pytest.raises(TraceError, match=r"^add_ \(test_analyze.py:\d+\): overwrites in place what tanh"):
        analyze(trace(model, (x,)).gm, (x,))


class Chain(nn.Module):
    """n blocks of conv, BatchNorm, ReLU."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(same(8, 8), Norm(8), nn.ReLU(inplace=True)) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def seconds(n: int) -> tuple[float, float]:
    """(exact fake run, whole proof) of a chain, the best of two."""
    x = images(4, 8, 12, 12)
    gm = trace(Chain(n), (x,)).gm
    best = [float("inf")] * 2
    for _ in range(2):
        start = time.process_time()
        run(Step(gm, (x,)).forward, Watch(hooks=True))
        middle = time.process_time()
        analyze(gm, (x,))
        best = [min(best[0], middle - start), min(best[1], time.process_time() - middle)]
    return best[0], best[1]


def test_the_cost_grows_with_the_number_of_nodes() -> None:
    seconds(2)
    (_, short), (exact, long) = seconds(5), seconds(20)
    assert long < 8 * short  # 4 times the nodes
    assert long < 24 * exact  # on two exact runs, two symbolic ones and the formulas


class ByValue(nn.Module):
    """Branches on what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if x.mean() > 0 else x * 2


def test_a_module_that_reads_values_is_counted_and_never_proved() -> None:
    model = Lambda(lambda m, x: m.c2(m.gate(m.c1(x))), c1=same(3, 8), gate=ByValue(), c2=same(8, 4))
    report = floorplan.check(model, images(), measured=True)
    assert report.verdict == UNPROVEN and not any((report.difference or {}).values())
    assert report.predicted.saved > 0 and any("counted in a real run" in n for n in report.notes)
    result = floorplan.rewrite(model, images(), sites="all")
    assert result.report.after.verdict == UNPROVEN
    assert not any((result.report.after.difference or {}).values())


@pytest.mark.parametrize(
    "make", [lambda: torch.tensor(2.0), lambda: torch.ones(2).sum(), lambda: torch.full((8, 1, 1), 2.0)]
)
def test_a_constant_made_in_forward_is_kept_not_state(make: Any) -> None:
    model = Lambda(lambda m, x: m.c1(x) * make(), c1=same(3, 8))
    report = floorplan.check(model, images(), measured=True)
    assert not any((report.difference or {}).values()) and report.verdict == AT_FLOOR
    assert report.predicted.saved == make().nbytes and "stores" not in str(report.notes)
