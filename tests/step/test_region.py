"""A region under autograd: exact gradients, and nothing of its arguments is held."""

import weakref

import torch
from torch import Tensor, nn

from floorplan.step.region import Region


def make(model: nn.Module, grads: tuple[bool, ...] = (True,)) -> Region:
    return Region(lambda m, *a: (m(*a),), model, grads, lambda: next(model.parameters()))


def test_gradients_and_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2)).double()
    x, g = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(g)
    want, params = leaf.grad, [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    region = make(model)
    with torch.no_grad():
        got, tape = region.forward(x)
        assert torch.equal(got, y) and not got.requires_grad and torch.equal(region.plain(x)[0], y)
        (gx,) = region.backward(tape, g)
    assert torch.equal(gx, want)
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), params, strict=True))


def test_the_argument_is_let_go() -> None:
    model = nn.Linear(3, 4).requires_grad_(False)
    anchor = nn.Parameter(torch.zeros(1))
    region = Region(lambda m, x: (m(x),), model, (True,), lambda: anchor)
    x = torch.randn(5, 3)
    storage = weakref.ref(x.untyped_storage())
    with torch.no_grad():
        out, tape = region.forward(x)
        del x
        assert storage() is None, "a frozen linear layer needs nothing of its input"
        (gx,) = region.backward(tape, torch.ones(5, 4))
    assert torch.allclose(gx, model.weight.sum(0).expand(5, 3)) and anchor.grad is None


def test_unused_results_and_arguments() -> None:
    anchor = nn.Parameter(torch.zeros(1))
    region = Region(lambda m, x, y: (x * 2, y.shape[0]), nn.Identity(), (True, True), lambda: anchor)
    x, y = torch.randn(3), torch.randn(2)
    with torch.no_grad():
        double, n, tape = region.forward(x, y)
        gx, gy = region.backward(tape, torch.ones(3), None)
    assert n == 2 and torch.equal(double, 2 * x) and gx.tolist() == [2, 2, 2] and gy.tolist() == [0, 0]
    with torch.no_grad():
        *_, tape = region.forward(x, y)
        assert [g.tolist() for g in region.backward(tape, None, None)] == [[0, 0, 0], [0, 0]]


def test_expanded_gradients_get_memory_of_their_own() -> None:
    anchor = nn.Parameter(torch.zeros(1))
    region = Region(lambda m, x: (x.sum(1),), nn.Identity(), (True,), lambda: anchor)
    with torch.no_grad():
        _, tape = region.forward(torch.randn(2, 3))
        (g,) = region.backward(tape, torch.ones(2))
    g.add_(1)
    assert g.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_finish_shares_the_loss() -> None:
    model = nn.Linear(3, 1, bias=False)
    region = Region(lambda m, x: m(x), model, (True,), lambda: model.weight)
    args: list[Tensor] = [torch.ones(4, 3)]
    with torch.no_grad():
        loss, gx = region.finish(lambda out, t: (out * t).mean(), 0.5, torch.ones(4, 1), args)
    assert not args and torch.allclose(loss, 0.5 * model(torch.ones(4, 3)).mean())
    assert torch.allclose(gx, model.weight.detach().expand(4, 3) / 8)
    assert torch.allclose(model.weight.grad, torch.full((1, 3), 0.5))
