"""What a study of the graph finds, and what may not be computed again."""

import operator

import torch
from torch import Tensor, fx, nn

from floorplan.budget.remat.study import out_of_place, study


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Leafy(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, Own) or super().is_leaf_module(m, name)


class Odd(nn.Module):
    """A random layer, a BatchNorm that learns statistics, an in-place add, unknown code, views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.own = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5), Own()
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(self.drop(self.norm(self.conv(x))))
        z = self.act(y * 3)
        a, b = z[:, :2], z[:, 2:]
        a += b.transpose(2, 3)
        return a.mean((2, 3))


def odd() -> fx.GraphModule:
    model = Odd().train()
    return in_place(fx.GraphModule(model, Leafy().trace(model)))


def in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with the += that fx takes for a +."""
    for n in gm.graph.nodes:
        if n.target is operator.add and n.name == "add":
            n.target = operator.iadd
    gm.recompile()
    return gm


def test_what_may_not_run_twice_is_found_by_what_it_does() -> None:
    values = study(odd(), (torch.randn(2, 3, 4, 4),))
    assert "random" in values["drop"].refused and "statistics" in values["norm"].refused
    assert "Own" in values["own"].refused and "did not make" in values["add"].refused
    assert values["conv"].refused == values["mul"].refused == values["mean"].refused == ""


def test_eval_mode_makes_them_harmless() -> None:
    values = study(odd().eval(), (torch.randn(2, 3, 4, 4),))
    assert values["drop"].refused == values["norm"].refused == ""


def test_memory_has_one_owner() -> None:
    values = study(odd(), (torch.randn(2, 3, 4, 4),))
    assert values["mul"].owner == "mul" and values["mul"].nbytes == 2 * 4 * 16 * 4
    assert values["mul"].written == "act"
    owners = {n: values[n].owner for n in ("act", "getitem", "getitem_1", "transpose", "add")}
    assert set(owners.values()) == {"mul"}
    assert values["conv"].macs == 2 * 16 * 3 * 4


def test_in_place_where_nobody_can_tell() -> None:
    gm = odd()
    plain, values = out_of_place(gm, (torch.randn(2, 3, 4, 4),))
    assert plain.act.inplace is False and gm.act.inplace is True
    assert values["act"].owner == "act" and not values["mul"].written
    # `a` and `b` are views of one result: writing to one would be seen by who reads the other later
    x = torch.randn(2, 3, 4, 4)
    torch.manual_seed(1)
    want = gm(x)
    torch.manual_seed(1)
    assert torch.equal(plain(x), want)


def test_an_overwritten_value_that_is_read_again_stays() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y.view(-1)
            y += 1
            return z + y.view(-1)

    plain, values = out_of_place(in_place(fx.symbolic_trace(Reads())), (torch.ones(2, 2),))
    assert torch.equal(plain(torch.ones(2, 2)), torch.full((4,), 6.0))
    assert values["mul"].written == "add"
