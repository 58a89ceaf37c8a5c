"""The lossy derivative: exact forward, stated levels, stated bound, stated bits, and its name everywhere."""

from pathlib import Path

import pytest
import torch
from smooth_nets import INPUT, adapted_net
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import floorplan
from floorplan.layers.lossy import LossyActivation, pack_levels, table
from floorplan.passes.lossy_activations import approximate

ACTS = [
    nn.SiLU(),
    nn.Hardswish(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Mish(),
    nn.ELU(0.3),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.Softplus(3.0, 5.0),
]


def level(m: LossyActivation, z: Tensor) -> Tensor:
    """The level that stands for act'(z), in z's dtype."""
    t = m.table(z.dtype)
    wide = z if z.dtype == torch.float64 else z.float()
    edges = torch.tensor(t.edges, dtype=wide.dtype)
    levels = torch.tensor(t.levels, dtype=z.dtype)
    return levels[torch.tensor(t.codes)[torch.bucketize(wide.contiguous(), edges)]]


def points(dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(0)
    z = [torch.randn(3000, generator=g, dtype=torch.float64) * 3, torch.linspace(-30, 30, 9001, dtype=torch.float64)]
    return torch.cat([*z, torch.tensor([0.0, 3.0, -3.0, 5 / 3])]).to(dtype)


def gradient(f: nn.Module, z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    z = z.detach().clone().requires_grad_()
    y = f(z)
    return y, torch.autograd.grad(y, z, g)[0]


@pytest.mark.parametrize("fit,bits", [("minimax", 1), ("minimax", 3), ("minimax", 8), ("normal", 2), ("normal", 5)])
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_level_and_bound(act: nn.Module, fit: str, bits: int) -> None:
    m = LossyActivation.of(act, bits, fit)
    for dtype in (torch.float32, torch.float64):
        z = points(dtype)
        g = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        y, got = gradient(m, z, g)
        assert torch.equal(y, act(z)) and torch.equal(got, g * level(m, z))
        assert len(level(m, z).unique()) <= 2**bits
        true = gradient(act, z.double(), torch.ones_like(z, dtype=torch.float64))[1]
        error = (g.double() * level(m, z).double() - g.double() * true).abs()
        assert bool((error <= m.error_bound * g.double().abs()).all())


def test_the_bound_is_reached_and_minimax_has_the_smallest() -> None:
    for bits in (1, 2, 4):
        bounds = {fit: LossyActivation("SiLU", bits, fit=fit).error_bound for fit in ("normal", "minimax")}
        assert bounds["minimax"] <= bounds["normal"]
        m = LossyActivation("SiLU", bits)
        z = points(torch.float64)
        true = gradient(nn.SiLU(), z, torch.ones_like(z))[1]
        assert float((level(m, z) - true).abs().max()) > 0.98 * m.error_bound


def test_normal_has_the_smaller_mean_square_where_inputs_are_normal() -> None:
    z = torch.randn(20000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    true = gradient(nn.Sigmoid(), z, torch.ones_like(z))[1]
    layers = [LossyActivation("Sigmoid", 2, fit=f) for f in ("normal", "minimax")]
    errors = [float((level(m, z) - true).square().mean()) for m in layers]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("bits,stored", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_bits_kept(bits: int, stored: int) -> None:
    seen: list[Tensor] = []
    m, z = LossyActivation("SiLU", bits, fit="minimax"), torch.randn(3, 5, 7, requires_grad=True)
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        m(z)
    assert [(t.dtype, t.numel()) for t in seen] == [(torch.uint8, (105 * stored + 7) // 8)]
    assert m.stored_bits == stored and (f"stored as {stored}" in repr(m)) == (bits != stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_last_and_short_floats(dtype: torch.dtype) -> None:
    z = torch.randn(2, 5, 4, 3).to(dtype).to(memory_format=torch.channels_last)
    m, g = LossyActivation("GELU", 4, fit="minimax"), torch.randn(2, 5, 4, 3).to(dtype)
    assert torch.equal(gradient(m, z, g)[1], g * level(m, z))


def test_many_segments() -> None:
    z = torch.randn(600_001)
    m = LossyActivation("Mish", 2, fit="minimax")
    assert torch.equal(gradient(m, z, torch.ones_like(z))[1], level(m, z))


def test_edges_are_the_last_numbers_before_a_change() -> None:
    t = table("Hardswish", (), 3, "minimax", True)
    assert list(t.edges) == sorted(t.edges) and len(t.codes) == len(t.edges) + 1
    assert -3.0 in t.edges
    packed = pack_levels(torch.tensor(t.edges), list(t.edges), list(t.codes), 8)
    assert packed.tolist() == list(t.codes[:-1])


def test_named_lossy_wherever_it_appears(tmp_path: Path) -> None:
    gm = adapted_net("efficient")
    twin, sites = approximate(gm, 4)
    bound = f"|error| <= {LossyActivation('SiLU', 4).error_bound:.4g} |g|"
    assert any("LOSSY" in s.note and bound in s.note for s in sites)
    assert any(isinstance(m, nn.SiLU) for m in gm.modules()) and "LOSSY" in repr(twin)
    x = torch.randn(INPUT)
    report = floorplan.check(twin, (x,), measured=True)
    entries = [e for e in report.tensors if e.op == "LossyActivation"]
    assert entries and all(e.verdict == "floor" and "LOSSY" in e.reason and e.bits_per_element == 4 for e in entries)
    assert report.measured is not None and report.measured.as_dict() == report.predicted.as_dict()
    assert torch.equal(twin(x), gm(x))
    floorplan.save(twin, tmp_path / "lossy.pt")
    again = floorplan.load(tmp_path / "lossy.pt")
    assert "LOSSY" in repr(again) and torch.equal(again(x), gm(x))


def test_refusals() -> None:
    assert "known are" in str(LossyActivation.of(nn.Softmax(), 2))
    with pytest.raises(ValueError, match="1 to 8"):
        LossyActivation("SiLU", 9)
    with pytest.raises(ValueError, match="not known"):
        LossyActivation("ReLU", 2)
    with pytest.raises(ValueError, match="fit"):
        LossyActivation("SiLU", 2, fit="best")
    assert "Softsign has no few-bit" in str(LossyActivation.of(nn.Softsign(), 2))
