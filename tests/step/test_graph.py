"""What a step needs to know of a graph: order, crossings, what learns."""

import torch
from small import Residual
from steps import graph_of
from torch import Tensor, nn

from floorplan.step.graph import crossings, learners, ordered, values_of


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
