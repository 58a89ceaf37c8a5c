"""Rematerialised nets: the same bits, predicted bytes, and no smaller budget with a higher measured peak."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from smooth_nets import INPUT, NETS, adapted_net
from torch import Tensor, fx, nn

import floorplan
from floorplan.budget.remat.ladder import Ladder, Problem, Remat, climb
from floorplan.budget.remat.study import out_of_place
from floorplan.errors import LoadError
from floorplan.ledger.figures import measure
from floorplan.ledger.losses import cross_entropy
from floorplan.ledger.macs import own_macs
from floorplan.ledger.run import Step
from floorplan.ledger.step_figures import step_figures
from floorplan.store.artifact import decode, encode

FEW = (1.0, 0.0)
X = torch.randn(INPUT, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small only wait for their threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def net(name: str) -> fx.GraphModule:
    return adapted_net(name)


@cache
def rungs(name: str) -> Ladder:
    return climb(net(name), (X,), prices=FEW)


@cache
def lowest(name: str) -> Remat:
    return rungs(name).fit()


def gradients(gm: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    out = gm(x)
    leaves = [x, *(p for p in gm.parameters() if p.requires_grad)]
    return out, list(torch.autograd.grad(out.square().sum(), leaves))


def same(a: nn.Module, b: nn.Module, x: Tensor) -> None:
    (out, got), (expected, want) = gradients(b, x), gradients(a, x)
    assert torch.equal(out, expected)
    for g, w in zip(got, want, strict=True):
        assert float((g - w).abs().max()) <= 1e-12 * float(w.abs().max())


@pytest.mark.parametrize("name", NETS)
def test_exact_and_predicted_to_the_byte(name: str) -> None:
    r, gm = lowest(name), net(name)
    first, last = r.ladder[0], r.ladder[r.rung]
    assert r.peak_after == last.requested_peak < first.requested_peak and last.saved < first.saved
    same(copy.deepcopy(gm).double(), copy.deepcopy(r.module).double(), X.double())
    for module, rung in ((gm, first), (r.module, last)):
        found = measure(module, X)
        assert (found.requested_peak, found.saved, found.saved_census) == (rung.requested_peak, rung.saved, rung.saved)


@pytest.mark.parametrize("name", NETS)
def test_a_smaller_budget_never_raises_the_measured_peak(name: str) -> None:
    ladder = rungs(name)
    high, low = ladder.rungs[0].requested_peak, ladder.rungs[-1].requested_peak
    last, work = high, 0
    for budget in (high, *(low + (high - low) * k // 5 for k in (4, 2)), low, low - 1):
        found = ladder.fit(budget)
        peak = measure(found.module, X).requested_peak
        assert peak <= last and peak <= max(budget, low) and found.ladder[found.rung].extra_macs >= work
        assert any("not met" in n for n in found.notes) == (budget < low)
        last, work = peak, found.ladder[found.rung].extra_macs


def test_extra_work_is_what_the_step_really_does_more() -> None:
    gm, y = net("efficient"), torch.zeros(INPUT[0], dtype=torch.int64)
    r = climb(gm, (X,), loss=cross_entropy, target=y, prices=FEW).fit()
    before, after = (own_macs(Step(m, (X,), y, cross_entropy)) for m in (gm, r.module))
    assert after["forward"] == before["forward"]
    assert after["backward"] - before["backward"] == r.ladder[r.rung].extra_macs > 0
    assert step_figures(Step(r.module, (X,), y, cross_entropy), fake=False).requested_peak == r.peak_after


def test_what_is_computed_again_is_named() -> None:
    r = lowest("efficient")
    assert "_1_depthwise_2" in r.ladder[r.rung].recomputed


def test_a_budget_that_is_not_met_is_said() -> None:
    r = rungs("convnext").fit(1000)
    assert r.peak_after == lowest("convnext").peak_after and f"{r.peak_after:,}" in r.notes[0]


def test_large_budget_changes_nothing() -> None:
    r = rungs("convnext").fit(1 << 40)
    assert r.module is net("convnext") and r.rung == r.ladder[0].extra_macs == 0


def test_saved_and_loaded(tmp_path: Path) -> None:
    r = lowest("groupnorm")
    floorplan.save(r.module, tmp_path / "remat.pt")
    again = floorplan.load(tmp_path / "remat.pt")
    same(copy.deepcopy(r.module).double(), again.double(), X.double())
    assert measure(again.float(), X).requested_peak == r.peak_after
    assert list(again.state_dict()) == list(net("groupnorm").state_dict())


def test_a_file_may_hand_over_layers_only() -> None:
    document = encode(lowest("groupnorm").module)
    handed = next(r for r in document["graph"] if r["op"] == "get_attr")
    for path in ("remat", "nowhere", "1.na.__class__"):
        with pytest.raises(LoadError):
            decode({**document, "graph": [r if r is not handed else {**r, "target": path} for r in document["graph"]]})


class Stateful(nn.Module):
    """Dropouts and a BatchNorm of the batch between smooth activations, all in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1)
        self.norm, self.drop, self.free = nn.BatchNorm2d(16), nn.Dropout(0.3), nn.InstanceNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.drop(nn.functional.silu(self.norm(self.a(x)))))
        y = nn.functional.gelu(self.b(y)) * torch.sigmoid(y[..., 1:-1, 1:-1])
        return self.c(nn.functional.mish(self.free(y))).mean((2, 3))


def test_random_numbers_and_statistics_are_used_once() -> None:
    torch.manual_seed(0)
    a = fx.symbolic_trace(Stateful().train())
    x = torch.randn(4, 3, 16, 16)
    r = climb(a, (x,)).fit()
    assert r.rung and "drop" not in r.ladder[r.rung].recomputed and "norm" not in r.ladder[r.rung].recomputed
    assert any("random" in n for n in r.notes) or any("statistics" in n for n in r.notes)
    first, second = copy.deepcopy(a).double(), copy.deepcopy(r.module).double()
    same(first, second, x.double())
    for (name, p), (_, q) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert torch.equal(p, q), name
    assert measure(r.module, x).requested_peak == r.peak_after


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
