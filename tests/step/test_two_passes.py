"""Steps in parts are exact or refused: losses that see a whole batch, draws, bytes counted apart; random nets with and
without coupling."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import contrastive, each, named, others
from mixing import counted, tried
from small import Residual
from steps import by_autograd, gradients, graph_of, worst
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.losses import Shared, as_loss
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.timeline import measure, predict

X = torch.randn(7, 3, 8, 8, dtype=torch.float64)
PLANS = (Schedule(micro_batch=2), Schedule(stages=(("pool", 3),), last=2), Schedule(4, (("pool", 2),), 3))


@pytest.fixture(scope="module")
def gm() -> fx.GraphModule:
    return graph_of(Residual().double(), X).eval()


def pairs() -> list[Any]:
    torch.manual_seed(0)
    return [(f, t()) for f, t in (*named((7, 5)), *others((7, 5)))]


@pytest.mark.parametrize("k", range(len(pairs())))
def test_every_loss_is_exact_in_parts(gm: fx.GraphModule, k: int) -> None:
    loss, y = pairs()[k]
    value, want = by_autograd(gm, (X,), y, Shared(as_loss(loss), None, 7).whole)
    for plan in PLANS[k % 3 :: 3] if k else PLANS:
        step = compile_step(gm, loss, X, plan=plan)
        got = step(X, y)
        assert abs(float(got - value)) <= 1e-12 * max(1, abs(float(value)))
        assert worst(gradients(gm), want) <= 1e-12, plan
        assert predict(step, (X,), y).blocks == measure(step, (X,), y).blocks


def test_the_whole_batch_before_the_loss_needs_one_pass(gm: fx.GraphModule) -> None:
    step = compile_step(gm, contrastive, X, plan=Schedule(stages=(("pool", 2),)))
    y = torch.zeros(7, dtype=torch.int64)
    names = [b.node for b in predict(step, (X,), y).blocks if b.direction == "forward"]
    again = compile_step(gm, contrastive, X, plan=Schedule(stages=(("pool", 2),), last=2))
    assert len([b.node for b in predict(again, (X,), y).blocks if b.direction == "forward"]) > 1.5 * len(names)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Dropout(0.5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.drop(torch.relu(self.a(x)))
        return self.head(F.dropout(torch.relu(self.b(x)).mean((2, 3)), 0.3, self.training))


def test_dropout_draws_the_same_in_both_passes() -> None:
    gm = graph_of(Dropping().double(), X).train()
    y, seen = torch.arange(7) % 5, list[Tensor]()

    def kept(out: Tensor, y: Tensor) -> Tensor:
        seen.append(out.detach().clone())
        return contrastive(out, y)

    step = compile_step(gm, kept, X, plan=Schedule(micro_batch=2))
    torch.manual_seed(5)
    step(X, y)
    got, after = gradients(gm), torch.rand(3)
    torch.manual_seed(5)
    out = torch.cat([gm(X[i : i + 2]) for i in range(0, 7, 2)])
    assert torch.equal(out.detach(), seen[0]) or torch.allclose(out.detach(), seen[0], atol=1e-12)
    contrastive(out, y).backward()  # type: ignore[no-untyped-call]
    assert worst(got, gradients(gm)) <= 1e-12
    assert torch.equal(after, torch.rand(3)), "the generator goes on behind the draws of one pass"


def test_a_loss_may_write_into_what_it_is_given(gm: fx.GraphModule) -> None:
    def clamped(out: Tensor, y: Tensor) -> Tensor:
        return contrastive(out.clamp_(-1, 1), y)

    y = torch.zeros(7, dtype=torch.int64)
    _, want = by_autograd(gm, (X,), y, clamped)
    compile_step(gm, clamped, X, plan=Schedule(micro_batch=3))(X, y)
    assert worst(gradients(gm), want) <= 1e-12


def test_a_loss_with_weights_of_its_own(gm: fx.GraphModule) -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return torch.cdist(out, self.centres).square().softmax(0)[torch.arange(len(y)), y].sum()

    own, y = Centres(), torch.arange(7) % 5
    _, want = by_autograd(gm, (X,), y, own)
    (mine,), own.centres.grad = [own.centres.grad], None
    compile_step(gm, own, X, plan=Schedule(micro_batch=2))(X, y)
    assert worst(gradients(gm), want) <= 1e-12
    torch.testing.assert_close(own.centres.grad, mine)


def test_what_fails_leaves_no_part_of_a_gradient(gm: fx.GraphModule) -> None:
    with pytest.raises(FloorplanError, match=r"loss: returns shape \[7, 5\]"):
        compile_step(gm, lambda o, y: o, X, plan=Schedule(micro_batch=2))(X, None)
    with pytest.raises(FloorplanError, match="has one row a sample; give a tensor of 7 rows"):
        compile_step(gm, "cross_entropy", X, plan=Schedule(micro_batch=2))(X, torch.zeros(6, dtype=torch.int64))
    assert not gradients(gm)


@pytest.mark.parametrize("plan", [Schedule(), PLANS[0], PLANS[2]])
def test_a_call_allocates_what_was_predicted(plan: Schedule) -> None:
    x = X.float()
    gm = graph_of(Residual(), x).eval()
    y = torch.arange(7) % 5

    def squared(out: Tensor, y: Tensor) -> Tensor:
        return (out - y[:, None]).square().mean()

    for loss, reduction in (("cross_entropy", None), (each, None), (contrastive, None), (squared, "mean")):
        step = compile_step(gm, loss, x, plan=plan, reduction=reduction)  # type: ignore[arg-type]
        said = predict(step, (x,), y).peak
        first = counted(step, x, y)[0]
        gradients(gm)
        assert said == first >= counted(step, x, y)[0]
        gradients(gm)


@pytest.mark.parametrize("shard", range(3))
def test_random_nets_are_exact_or_refused(shard: int) -> None:
    found = [tried(seed, lambda s: [*named(s), *others(s)]) for seed in range(shard * 8, shard * 8 + 8)]
    assert not [f for f in found if f.kind == "wrong"]
    assert not [f for f in found if f.kind == "refused" and not f.touch], "samples apart are taken"
    assert not [f for f in found if f.kind == "exact" and f.touch], "samples that touch are refused"
    assert not [f for f in found if f.predicted != f.allocated], "a call allocates what was predicted"
