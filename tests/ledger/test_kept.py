"""What is computed is kept: fake runs, copies onto fakes and tracings of one check and one rewrite are counted."""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import floorplan
from floorplan.graph.tracer import Tracer
from floorplan.ledger import fakes, inputs, run
from tests.examples.test_backbones import factory

DOORS = {"_once": run._once, "concrete_fakes": fakes.concrete_fakes, "symbolic_fakes": fakes.symbolic_fakes}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls at the doors, wherever they are imported; real runs apart."""
    found: Counter[str] = Counter()

    def counted(name: str, door: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            real = name == "_once" and args[2] is args[0].model  # a fake run has a copy
            found["real" if real else name] += 1
            return door(*args, **kwargs)

        return call

    for name, door in DOORS.items():
        for m in [m for k, m in sys.modules.items() if k.startswith("floorplan.") and vars(m).get(name) is door]:
            monkeypatch.setattr(m, name, counted(name, door))
    monkeypatch.setattr(inputs, "_takes", counted("accepts", inputs._takes))
    monkeypatch.setattr(Tracer, "trace", counted("trace", Tracer.trace))
    yield found


def test_a_check_runs_the_model_four_times_its_graph_once_and_a_small_real_forward(counts: Counter[str]) -> None:
    model, x = factory("mobilenet_v2")(), torch.randn(8, 1, 97, 60)
    report = floorplan.check(model, x)
    assert counts == {"_once": 5, "real": 1, "concrete_fakes": 2, "symbolic_fakes": 1, "trace": 1}
    assert any(a.startswith("B < 16 (tried at B = ") for a in report.proof.assumptions)


def test_a_rewrite_traces_once_a_mode_and_runs_every_graph_once(counts: Counter[str]) -> None:
    model, x = factory("mobilenet_v2")(), torch.randn(8, 1, 97, 60)
    floorplan.rewrite(model, x, rank=2, measured=False)
    assert counts["trace"] == 2 and counts["real"] == 0
    assert counts["_once"] + counts["accepts"] <= 18
    assert counts["concrete_fakes"] + counts["symbolic_fakes"] <= 13
