"""floorplan remat: the ladder, budgets that are met or not, files that load, and what is lossy said so."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from small import Smooth
from smooth_nets import adapted_net
from steps import by_autograd, weights_for, worst
from torch import fx, nn

import floorplan
from floorplan.budget.remat import report
from floorplan.budget.remat.ladder import climb
from floorplan.budget.remat.report import remat
from floorplan.errors import FloorplanError

X = torch.randn(2, 3, 16, 16)


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    """One adapted net for all tests."""
    gm = adapted_net("efficient")
    gm.meta["floorplan"] = {"input": [list(X.shape)]}
    return gm


def test_a_budget_is_met_measured_and_exact(graph: fx.GraphModule, tmp_path: Path) -> None:
    loose = remat(graph, None, X, batch=2, measured=True, loss="sum")
    first = loose.result.ladder[0].requested_peak
    assert loose.measured == loose.result.peak_after < first and loose.fits
    budget = loose.state + (first + loose.result.peak_after) // 2
    tight = replace(loose, budget=budget, result=climb(graph.train(), (X,)).fit(budget - loose.state))
    assert tight.fits and tight.as_json()["rung"] >= 1 and "met" in str(tight) and "->" in str(tight)
    floorplan.save(loose.module, tmp_path / "again.pt")
    back = floorplan.load(tmp_path / "again.pt").eval().double()
    target = weights_for(copy.deepcopy(graph).eval().double(), (X.double(),))
    _, want = by_autograd(copy.deepcopy(graph).eval().double(), (X.double(),), target)
    assert worst(by_autograd(back, (X.double(),), target)[1], want) <= 1e-12


def test_a_budget_that_cannot_be_met_says_so(graph: fx.GraphModule) -> None:
    found = remat(graph, X, 1000, batch=2, loss="sum")
    assert not found.fits and "not met" in str(found) and found.result.rung == len(found.result.ladder) - 1
    assert json.loads(json.dumps(found.as_json()))["fits"] is False


def test_lossy_is_named_with_its_bound(graph: fx.GraphModule) -> None:
    found = remat(graph, X, 10**12, batch=2, loss="sum", lossy_bits=4)
    assert found.lossy and all("LOSSY gradient, bits=4" in line and "|error| <=" in line for line in found.lossy)
    assert str(found).count("LOSSY") >= len(found.lossy) and found.result.rung == 0


def test_a_search_as_it_is_printed() -> None:
    found = remat(Smooth(), torch.randn(2, 3, 16, 16), 250_000, measured=True)
    assert_expected_inline(
        str(found),
        """\
Smooth: one step, batch 8, loss cross_entropy

      rung    requested peak      total      saved    extra MACs    nodes again
--  ------  ----------------  ---------  ---------  ------------  -------------
         0         267,272 B  307,040 B  116,740 B             0              0
->       1         217,096 B  256,864 B   66,564 B       339,120              1

measured requested peak: 217,096 B, difference 0
budget 250,000 B: not met, nothing was written""",
    )
    assert found.csv().splitlines()[0] == "taken,rung,requested peak,total,saved,extra MACs,nodes again"


@pytest.mark.parametrize("given", [(X, 1000), (1000, X), (X,), (None, X), ()])
def test_model_and_inputs_come_first_and_the_old_order_is_understood(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "recomputed", lambda source, plan, budget, *rest: (source.inputs, budget))
    want = X if any(g is X for g in given) else None, 1000 if any(g == 1000 for g in given if g is not X) else None
    found: Any = remat(nn.Identity(), *given)
    assert found == want
    found = remat(nn.Identity(), budget=1000, inputs=X)
    assert found == (X, 1000)


def test_errors() -> None:
    with pytest.raises(FloorplanError, match="remat: a budget of type str; give a number of bytes"):
        remat(nn.Identity(), X, "32MB")  # type: ignore[arg-type]
    with pytest.raises(FloorplanError, match="--loss nope: not known"):
        remat(nn.Identity(), None, X, loss="nope")
