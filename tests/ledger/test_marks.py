"""Marked code calls out before each node and runs as before; autograd's graph tells who saved what."""

from typing import Any

import torch
from hard_nets import Lambda
from kinds import Apply, Hiding
from torch import Tensor, fx, nn

from floorplan.graph.trace import trace
from floorplan.ledger.marks import keepers_of, marked
from floorplan.ledger.storage import StorageTracker


def net() -> fx.GraphModule:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.relu(m.a(x)))

    return fx.symbolic_trace(Lambda(run, a=nn.Linear(10, 6), b=nn.Linear(6, 3)))


def test_each_node_is_told_in_order_and_the_result_is_the_same() -> None:
    gm, x, seen = net(), torch.randn(5, 10), list[str]()
    before = gm.code
    twin = marked(gm, seen.append)
    assert torch.equal(twin(x), gm(x)) and seen == ["a", "relu", "b"]
    assert gm.code == before and twin.a is gm.a and twin.b is gm.b


def test_values_die_as_in_the_code_without_marks() -> None:
    gm, x = net(), torch.randn(5, 10)
    lines = []
    for model in (gm, marked(gm, lambda node: None)):
        with torch.no_grad(), StorageTracker([x, *gm.parameters()]) as tracker:
            model(x)
        lines.append([(v.born, v.died, v.op) for v in tracker.timeline.lives])
    assert lines[0] == lines[1] and len(lines[0]) == 3


def keepers(gm: fx.GraphModule, x: Tensor) -> list[tuple[str, str]]:
    """(the node that made a storage, the first node that saved it)."""
    with StorageTracker([x, *gm.parameters()]) as tracker:
        out = marked(gm, tracker.enter)(x)
        tracker.enter("end", "backward")
        found = keepers_of(out, tracker)
    return [(tracker.timeline.lives[i].node, saver) for i, saver in sorted(found.items())]


def test_the_first_saver_keeps() -> None:
    x = torch.randn(5, 10)
    assert keepers(net(), x) == [("relu", "relu")]

    def squares(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return torch.sin(y) * torch.tanh(y)

    gm = fx.symbolic_trace(Lambda(squares, a=nn.Linear(10, 6)))
    assert keepers(gm, x) == [("a", "sin"), ("sin", "mul"), ("tanh", "tanh")]


def test_what_hides_on_a_context_is_found_and_nothing_where_nothing_trains() -> None:
    x = torch.randn(5, 10)
    gm = trace(Lambda(lambda m, x: m.h(m.a(x)), a=nn.Linear(10, 6), h=Apply(Hiding)), (x,)).gm
    assert [saver for _, saver in keepers(gm, x)] == ["h"]
    assert keepers(net().requires_grad_(False), x) == []
    assert keepers_of(None, StorageTracker()) == {}


def test_an_overwritten_tensor_is_left_to_the_backward_to_report() -> None:
    def spoil(m: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(m.a(x))
        z = y * 2
        y.mul_(3)
        return z

    gm = fx.symbolic_trace(Lambda(spoil, a=nn.Linear(10, 6)))
    assert keepers(gm, torch.randn(5, 10)) == []
