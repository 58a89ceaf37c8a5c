"""What is found of a graph once, for all its programs."""

import torch
from small import Residual
from steps import graph_of

from floorplan.ledger.losses import total_of
from floorplan.step.compile import compile_step, compiled
from floorplan.step.rules import RULES
from floorplan.step.schedule import Schedule
from floorplan.step.studied import studied


def test_a_graph_is_looked_at() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(Residual(), x)
    s = studied(gm, (x,))
    assert [n.name for n in s.nodes][:2] == ["x", "stem"] and s.output.name == "output"
    assert [n.name for n in s.inside] == [n.name for n in s.nodes if n.name not in ("x", "output")]
    assert s.values["stem"].shape == (2, 8, 8, 8) and "stem" in s.learns and "x" not in s.learns
    assert s.rules["stem"] is RULES["site"] and not {"x", "pool", "fc", "output"} & set(s.rules)
    assert s.crossings["pool"] == "pool" and "conv" not in s.crossings  # pool is still to be read


def test_programs_of_one_look_are_those_of_two() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(Residual(), x)
    s = studied(gm, (x,))
    for schedule in (Schedule(), Schedule(stages=(("pool", 1),), branches=()), Schedule(micro_batch=1)):
        step = compiled(s, "sum", schedule)
        assert step.source == compile_step(gm, "sum", x, plan=schedule).source
        assert step.loss is total_of and not step.mean
