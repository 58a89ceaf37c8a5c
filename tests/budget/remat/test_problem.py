"""The cuts of a small graph: what prices and divisions allow."""

import torch
from torch import Tensor, fx, nn

from floorplan.budget.remat.problem import Problem
from floorplan.budget.remat.study import out_of_place


class Chain(nn.Module):
    """Narrow, wide, narrow, three times; a product keeps what the activation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Conv2d(4, 24, 1).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Conv2d(24, 4, 1).requires_grad_(False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(24, 1, 1))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(nn.functional.silu(up(x)) * self.scale)
        return torch.tanh(self.drop(x))


def problem() -> Problem:
    plain, values = out_of_place(fx.symbolic_trace(Chain().train()), (torch.randn(2, 4, 8, 8),))
    return Problem(plain, values)


def test_dear_work_leaves_convs_alone_and_free_work_does_not() -> None:
    p = problem()
    dear, free = (next(iter(p.candidates((price,)))) for price in (1.0, 0.0))
    assert {n for n in dear if p.values[n].macs} == set() and {"silu_1", "silu_2"} <= dear
    assert {"up_1", "up_2", "silu_2"} <= free  # nothing before the first trained factor is kept


def test_divisions_shorten_what_is_computed_at_once() -> None:
    p = problem()
    found = list(dict.fromkeys(p.candidates((0.0,))))
    assert len(found) > 1
    assert any("up_2" in again and not {"down_0", "down_1"} & again for again in found)


def test_random_values_are_kept_and_said() -> None:
    p = problem()
    assert all("drop" not in again for again in p.candidates((1.0, 0.0)))
    assert not p.values["silu_2"].macs and p.values["up_1"].macs == 2 * 64 * 4 * 24
    assert p.values["silu_1"].nbytes == 2 * 24 * 64 * 4
