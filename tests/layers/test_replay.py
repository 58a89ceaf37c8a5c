"""MemFLoRA-SG: the replay's gradient of P is plain autograd's, and nothing else is touched."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import randomize, run_passes
from hard_nets import Lambda
from small import Residual
from torch import Tensor, fx, nn

import floorplan
from floorplan import passes
from floorplan.errors import FloorplanError
from floorplan.layers.fused import FusedConv
from floorplan.layers.replay import Replay
from floorplan.methods.verify import randomize_adapters, set_plain
from floorplan.passes.insert_memflora import memflora


def adapted(model: nn.Module, x: Tensor, sites: str = "all", std: float = 0.3) -> fx.GraphModule:
    """The model as a float64 graph of MemFLoRA sites in train mode, every U drawn."""
    line = passes.pipeline(memflora(2, sites))
    gm, _ = run_passes(randomize(model), line, x)
    randomize_adapters(gm, std)
    return gm.train()


def weighted(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def step(gm: nn.Module, x: Tensor, chunks: int = 1, seed: int = 7) -> Replay:
    """One forward, backward and replay, from a known random state."""
    replay = Replay(gm)
    torch.manual_seed(seed)
    with replay.watching():
        weighted(gm(x)).backward()
    replay(x, chunks=chunks)
    return replay


def plain_grads(gm: nn.Module, x: Tensor, seed: int = 7) -> list[Tensor]:
    """Gradients of every distinct P by autograd through the formula, as leaves that train."""
    twin = copy.deepcopy(gm)
    set_plain(twin, True)
    leaves = [p.requires_grad_() for p in Replay(twin).projections()]
    torch.manual_seed(seed)
    return list(torch.autograd.grad(weighted(twin(x)), leaves))


def close(got: Tensor | None, want: Tensor) -> None:
    assert got is not None and got.shape == want.shape and want.any()
    assert float((got - want).abs().max()) <= 1e-12 * float(want.abs().max())


def x64(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64)


def test_one_site_by_hand() -> None:
    """relu(bn(conv(x, W + U o P))): every P differentiated through torch's own ops."""
    torch.manual_seed(0)
    conv, bn, x = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), x64(3, 4, 5, 5)
    source = randomize(nn.Sequential(conv, bn, nn.ReLU())).double()
    gm = adapted(source, x)
    (p,) = step(gm, x).projections()
    leaf = p.clone().requires_grad_()
    u = next(m.U for m in gm.modules() if isinstance(m, FusedConv))
    assert u is not None
    w = conv.weight.detach() + torch.einsum("orhw,ri->oihw", u.detach(), leaf[0])
    z = F.conv2d(x, w, conv.bias, padding=1)
    z = F.batch_norm(z, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps)
    (want,) = torch.autograd.grad(weighted(F.relu(z)), leaf)
    close(p.grad, want)


def geometries(m: Any, x: Tensor) -> Tensor:
    y = m.strided(F.relu(m.grouped(F.relu(m.odd(x)))))
    return m.up(y) + m.head(y).mean((2, 3), keepdim=True)


def zoo() -> nn.Module:
    """Asymmetric and reflected padding, groups, a sampled 1x1, a transposed conv."""
    return Lambda(
        geometries,
        odd=nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"),
        grouped=nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3),
        strided=nn.Conv2d(9, 6, 1, stride=2),
        up=nn.ConvTranspose2d(6, 5, 3, 2, 1, output_padding=1),
        head=nn.Conv2d(6, 5, 1),
    )


def shared(m: Any, x: Tensor) -> Tensor:
    return m.out(F.relu(m.conv(F.relu(m.conv(x)))))


def tied() -> nn.Module:
    """One conv called twice: two sites on one P."""
    return Lambda(shared, conv=nn.Conv2d(4, 4, 3, padding=1), out=nn.Conv2d(4, 5, 1))


def noisy(m: Any, x: Tensor) -> Tensor:
    return m.b(m.channels(m.elements(F.relu(m.a(m.before(x))))))


def dropping() -> nn.Module:
    """Dropouts before the first site, which nothing differentiates, and between sites."""
    return Lambda(
        noisy,
        before=nn.Dropout(0.3),
        a=nn.Conv2d(4, 8, 3),
        elements=nn.Dropout(0.5),
        channels=nn.Dropout2d(0.4),
        b=nn.Conv2d(8, 5, 1),
    )


NETS = {"geometries": zoo, "shared": tied, "dropout": dropping}


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(NETS[name](), x)
    want = plain_grads(gm, x)
    found = step(gm, x).projections()
    assert len(found) == len(want) == {"geometries": 5, "shared": 2, "dropout": 2}[name]
    for p, g in zip(found, want, strict=True):
        close(p.grad, g)


def test_another_random_state_would_not_do() -> None:
    """The dropout test above is one: with other draws the gradients are others."""
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(dropping(), x)
    assert not torch.allclose(plain_grads(gm, x, 7)[1], plain_grads(gm, x, 8)[1])


def test_a_residual_net_with_pools_and_dropout() -> None:
    x = x64(4, 3, 12, 12)
    gm = adapted(Residual(), x)
    want = plain_grads(gm, x)
    for p, g in zip(step(gm, x).projections(), want, strict=True):
        close(p.grad, g)


@pytest.mark.parametrize("chunks", [2, 3, 8, 50])
def test_chunks_give_the_same(chunks: int) -> None:
    torch.manual_seed(0)
    x = x64(8, 4, 9, 9)
    gm = adapted(zoo(), x)
    want = plain_grads(gm, x)
    for p, g in zip(step(gm, x, chunks).projections(), want, strict=True):
        close(p.grad, g)


def normalised(m: Any, x: Tensor) -> Tensor:
    return m.b(m.norm(m.a(x)))


def by_batch(norm: nn.Module) -> nn.Module:
    return Lambda(normalised, a=nn.Conv2d(4, 8, 3), norm=norm, b=nn.Conv2d(8, 5, 1))


@pytest.mark.parametrize("train", [True, False])
def test_chunks_are_refused_where_samples_hang_together(train: bool) -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    batch = adapted(by_batch(nn.BatchNorm2d(8, track_running_stats=False)), x).train(train)
    with pytest.raises(FloorplanError, match=r"^memflora-sg: norm \(BatchNorm2d\) cannot be replayed in chunks"):
        step(batch, x, 2)
    drop = adapted(dropping(), x).train(train)
    if train:
        with pytest.raises(FloorplanError, match=r"memflora-sg: before \(PackedDropout\).*chunks=1$"):
            step(drop, x, 2)
    else:
        want = plain_grads(drop, x)
        for p, g in zip(step(drop, x, 2).projections(), want, strict=True):
            close(p.grad, g)


def drawing(m: Any, x: Tensor) -> Tensor:
    return m.b(F.dropout(F.relu(m.a(F.dropout(x, 0.5, True))), 0.5, True))


def test_draws_outside_of_layers_are_noticed_too() -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(Lambda(drawing, a=nn.Conv2d(4, 8, 3), b=nn.Conv2d(8, 5, 1)), x)
    with pytest.raises(FloorplanError, match="a step that draws random numbers cannot be replayed"):
        step(gm, x, 2)
    gm.zero_grad()
    want = plain_grads(gm, x)
    for p, g in zip(step(gm, x).projections(), want, strict=True):
        close(p.grad, g)


def test_nothing_but_the_gradient_of_p_is_touched() -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(dropping(), x)
    replay = Replay(gm)
    with replay.watching():
        weighted(gm(x)).backward()
    assert all(m.gq is not None and m.gq.shape[:2] == (4, 2) for m in replay.sites)
    state = {n: t.clone() for n, t in gm.state_dict().items()}
    grads = [p.grad for p in gm.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    torch.manual_seed(123)
    rng = torch.get_rng_state()
    replay(x)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(t, state[n]) for n, t in gm.state_dict().items())
    for p, g, v in zip(gm.parameters(), grads, values, strict=True):
        assert p.grad is g and (g is None or (v is not None and torch.equal(g, v)))
    assert all(m.gq is None and not m.captures for m in replay.sites)
    assert not any(m._forward_pre_hooks for m in replay.sites)
    assert not any(p.requires_grad for p in replay.projections())


def test_gradients_add_up_until_they_are_cleared() -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(zoo(), x)
    want = plain_grads(gm, x)
    step(gm, x)
    for p, g in zip(step(gm, x).projections(), want, strict=True):
        close(p.grad, 2 * g)


def test_outside_watching_nothing_is_captured() -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(zoo(), x)
    replay = step(gm, x)
    for p in replay.projections():
        p.grad = None
    weighted(gm(x)).backward()
    replay(x)
    assert all(m.gq is None for m in replay.sites)
    assert all(p.grad is None for p in replay.projections())


def test_u_of_zero_gives_p_no_gradient_and_two_optimizers_train() -> None:
    torch.manual_seed(0)
    x = x64(4, 4, 9, 9)
    gm = adapted(zoo(), x, std=0.0)
    replay = step(gm, x)
    assert all(p.grad is not None and not p.grad.any() for p in replay.projections())
    ups = torch.optim.SGD([p for p in gm.parameters() if p.requires_grad], lr=1e-3)
    downs = torch.optim.SGD(replay.projections(), lr=1e-3)
    before = [p.clone() for p in replay.projections()]
    for _ in range(2):
        ups.zero_grad()
        downs.zero_grad()
        step(gm, x)
        ups.step()
        downs.step()
    assert not any(torch.equal(p, b) for p, b in zip(replay.projections(), before, strict=True))


def test_a_tied_p_stays_one_through_save_and_load(tmp_path: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    gm = floorplan.rewrite(tied(), x, method="memflora-sg", measured=False).module
    floorplan.save(gm, tmp_path / "tied.pt")
    for m in (gm, floorplan.load(tmp_path / "tied.pt")):
        assert len(Replay(m).sites) == 3 and len(Replay(m).projections()) == 2


def test_a_model_without_sites_is_refused() -> None:
    with pytest.raises(FloorplanError, match="^memflora-sg: the model has no MemFLoRA site"):
        Replay(nn.Conv2d(4, 4, 1))
