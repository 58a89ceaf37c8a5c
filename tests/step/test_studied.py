"""What programs need to know of a graph is found once, and none of it depends on the batch."""

import torch
from small import Inverted
from steps import graph_of

from floorplan.step.rules import RULES
from floorplan.step.studied import studied

X = torch.randn(2, 3, 8, 8)


def test_a_graph_is_looked_at_once() -> None:
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
