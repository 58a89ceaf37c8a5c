"""What is found of a graph once, for all its programs."""

import torch
from small import Inverted, Residual
from steps import graph_of
from torch import Tensor, fx, nn

from floorplan.ledger.losses import LOSSES
from floorplan.step.compile import compile_step, compiled
from floorplan.step.rules import RULES
from floorplan.step.schedule import Schedule
from floorplan.step.studied import crossings, learners, ordered, studied, values_of

X = torch.randn(2, 3, 8, 8)


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
        assert step.loss is LOSSES["sum"]


def test_an_inverted_residual_is_looked_at() -> None:
    gm = graph_of(Inverted().eval(), X, 2, "pointwise")
    s = studied(gm, (X,))
    assert [n.name for n in s.nodes] == [n.name for n in gm.graph.nodes if n.op != "get_attr"]
    assert s.output.op == "output" and s.output not in s.inside and s.values["x"].shape == X.shape
    assert {n.name for n in s.inside} - s.rules.keys() == {"mean"}  # it runs under autograd
    assert s.rules["stem"] is RULES["site"] and "x" not in s.learns and {"same_0", "mean"} <= s.learns
    assert s.crossings["stem"] == "stem" and "same_0" not in s.crossings  # the skip crosses there too


def test_the_batch_does_not_matter() -> None:
    gm = graph_of(Inverted().eval(), X, 2, "pointwise")
    one, more = studied(gm, (X,)), studied(gm, (torch.randn(5, 3, 8, 8),))
    assert (one.nodes, one.learns, one.rules, one.crossings) == (more.nodes, more.learns, more.rules, more.crossings)


class Chunks(nn.Module):
    """Two halves of a conv's output, one of them read late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        one, two = z.chunk(2, 1)
        return torch.cat((self.b(two), one), 1)


def test_items_follow_their_tuple_and_the_graph_is_left_alone() -> None:
    x = torch.randn(2, 3, 4, 4)
    gm = graph_of(Chunks(), x)
    before = [n.name for n in gm.graph.nodes]
    names = [n.name for n in ordered(gm)]
    at = names.index("chunk")
    assert names[at + 1 : at + 3] == ["getitem", "getitem_1"] and sorted(names) == sorted(before)
    assert [n.name for n in gm.graph.nodes] == before


def test_cuts_where_one_value_crosses() -> None:
    gm = graph_of(Residual(), torch.randn(2, 3, 8, 8))
    found = [(n.name, v.name) for n, v in crossings(ordered(gm))]
    assert found == [(n, n) for n in ("stem", "pool", "proj", "mean", "drop", "fc")]


def test_nothing_upstream_of_the_first_trainable_learns() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(Residual(), x)
    values = values_of(gm, (x,))
    assert values["pool"].shape == (2, 8, 4, 4)
    assert learners(gm, values) == {"stem", "pool", "conv", "proj", "mean", "drop", "fc", "output"}
    gm.get_submodule("stem").U.requires_grad_(False)
    assert learners(gm, values) == {"conv", "proj", "mean", "drop", "fc", "output"}


def test_an_item_by_numbers_made_later_stays_behind_them() -> None:
    class Own(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y[torch.arange(y.shape[0]), 0]

    names = [n.name for n in ordered(fx.symbolic_trace(Own()))]
    assert names.index("arange") < names.index("getitem_1")
