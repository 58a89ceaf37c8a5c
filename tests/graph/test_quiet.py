"""What is computed under torch.no_grad() is in the graph, keeps nothing, and gets no gradient."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traced_nets import Net, agree, conv

import floorplan
from floorplan.graph.trace import trace
from floorplan.ledger.run import Step, Watch, run

X = torch.randn(2, 3, 8, 8)


def teacher(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        t = s.t(x)
    return (s.c(x) - t).pow(2).mean((1, 2, 3))


def own_features(s: Any, x: Tensor) -> Any:
    y = torch.relu(s.c(x))
    with torch.no_grad():
        weight = torch.softmax(s.t(y).flatten(1), 1)
    return y * weight.sum(1)[:, None, None, None]


def functional(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        a, b = F.conv2d(x, s.t.weight, padding=1).chunk(2, 2)
        t = torch.cat([a, b], 2)
    return s.c(x) * t


@torch.no_grad()
def _targets(s: Any, x: Tensor) -> Tensor:
    return s.t(x).argmax(1)  # type: ignore[no-any-return]


def labels(s: Any, x: Tensor) -> Any:
    return F.cross_entropy(s.c(x), _targets(s, x), reduction="none").mean((1, 2))


def momentum_buffer(s: Any, x: Tensor) -> Any:
    y = s.c(x)
    with torch.no_grad():
        s.running.mul_(0.9).add_(0.1 * y.mean((0, 2, 3)))
    return y - s.t(x).detach()


def grad_again(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        t = s.t(x)
        with torch.enable_grad():
            y = s.c(x)
    return y + t


def in_a_block(s: Any, x: Tensor) -> Any:
    return teacher(s.b, x) + s.c(x).mean((1, 2, 3))


CASES = (teacher, own_features, functional, labels, momentum_buffer, grad_again, in_a_block)


def net(fn: Any) -> Net:
    block = Net(teacher, c=conv(), t=nn.Sequential(conv(), nn.BatchNorm2d(3), nn.ReLU()))
    model = Net(fn, c=nn.Sequential(conv(), nn.BatchNorm2d(3)), t=conv(), b=block)
    model.register_buffer("running", torch.zeros(3))
    return model


def kept(m: nn.Module) -> list[tuple[str, int]]:
    saved = run(Step(m, (X,)).forward, Watch(hooks=True)).saved
    return sorted((str(s.dtype), int(s.tensor_bytes)) for s in saved if s.owner == "kept")


@pytest.mark.parametrize("fn", CASES)
def test_the_graph_computes_and_keeps_what_the_model_does(fn: Any) -> None:
    model = net(fn)
    t = trace(model, [X])
    assert not t.opaque and set(t.gm.state_dict()) == set(model.state_dict())
    agree(model, t.gm, X)
    assert kept(t.gm) == kept(model)
    copies = copy.deepcopy(model), copy.deepcopy(t.gm)
    for m in copies:
        sum(v.sum() for v in [m(X)]).backward()
    want = {n: p.grad for n, p in copies[0].named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in copies[1].named_parameters() if p.grad is not None}
    assert want.keys() == got.keys() and all(torch.equal(got[n], g) for n, g in want.items())


@pytest.mark.parametrize("fn", CASES)
@pytest.mark.parametrize("mode", [True, False])
def test_the_rest_is_adapted_and_files_hold_it(fn: Any, mode: bool, tmp_path: Any) -> None:
    model = net(fn).train(mode)
    found = floorplan.rewrite(model, X, sites="all", measured=False)
    refused = {s.node: s.refused for sites in found.report.after.log.values() for s in sites}
    assert found.module.get_submodule("c" if fn is not in_a_block else "b.c")
    if fn not in (functional, in_a_block):
        assert "no gradient would ever reach an adapter" in refused["t"]
    floorplan.save(found.module, tmp_path / "a.pt")
    again = floorplan.load(tmp_path / "a.pt").eval()
    torch.testing.assert_close(again(X), found.module.eval()(X))


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda s, x: _written(s, x), "writes under torch.no_grad() into a tensor from outside"),
        (lambda s, x: _shared(s, x), "calls c.0 under torch.no_grad() and outside of it"),
        (lambda s, x: _unwatched(s, x), "computes under torch.inference_mode()"),
    ],
)
def test_what_cannot_be_said_is_left_whole(fn: Any, why: str) -> None:
    assert why in trace(net(fn), [X]).opaque["model"]


def _written(s: Any, x: Tensor) -> Any:
    y = s.c(x)
    with torch.no_grad():
        y = y.mul_(2)
    return y


def _shared(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        t = s.c(x)
    return s.c(x) - t


def _unwatched(s: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        t = s.t(x)
    return s.c(x) - t


def test_full_training_leaves_the_teacher_alone() -> None:
    gm = floorplan.rewrite(net(teacher), X, method="full", measured=False).module
    assert {n for n, p in gm.named_parameters() if not p.requires_grad} >= {"t.weight", "t.bias"}
    assert gm.get_parameter("c.0.weight").requires_grad
