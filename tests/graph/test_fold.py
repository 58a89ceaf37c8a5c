"""What folds into a site, why not, and the folding."""

from typing import Any

import pytest
import torch
from graphs import last, randomize
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from floorplan.graph.fold import bn_reason, conv_reason, scale_note, tied_twin, to_site


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * 2


class Standardized(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = super()._conv_forward(x, weight - weight.mean(), bias)
        return y


class Renamed(nn.Conv2d):
    pass


class NormAct(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def hooked(m: nn.Module) -> nn.Module:
    m.register_forward_hook(lambda *a: None)
    return m


def integers() -> nn.Module:
    m = nn.Conv2d(3, 4, 1)
    m.weight = nn.Parameter(torch.zeros(4, 3, 1, 1, dtype=torch.int8), requires_grad=False)
    return m


@pytest.mark.parametrize(
    "conv,reason",
    [
        (nn.Conv2d(3, 4, 1), ""),
        (nn.ConvTranspose3d(3, 4, 1), ""),
        (Renamed(3, 4, 1), ""),
        (Padded(3, 4, 1), "Padded has a forward of its own"),
        (Standardized(3, 4, 1), "Standardized has a forward of its own"),
        (nn.LazyConv2d(4, 1), "it is lazy; run one batch through the model first"),
        (hooked(nn.Conv2d(3, 4, 1)), "it has hooks, which a fused site would drop"),
        (spectral_norm(nn.Conv2d(3, 4, 1)), "it has hooks, which a fused site would drop"),
        (integers(), "its weight is torch.int8"),
        (
            parametrizations.weight_norm(nn.Conv2d(3, 4, 1)),
            "its weight is parametrized; remove the parametrization first (leave_parametrized=True)",
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_conv_reasons(conv: nn.Module, reason: str) -> None:
    assert conv_reason(conv) == reason


def norm(**buffers: float) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(4)
    for name, value in buffers.items():
        getattr(bn, name)[2] = value
    return bn


@pytest.mark.parametrize(
    "bn,reason",
    [
        (nn.BatchNorm2d(4), ""),
        (nn.BatchNorm2d(4, affine=False), ""),
        (nn.SyncBatchNorm(4), ""),
        (norm(running_var=0.0), ""),
        (norm(running_var=-1e-5), "running_var + eps <= 0 at channel 2"),
        (norm(running_var=-1.0), "running_var + eps <= 0 at channel 2"),
        (norm(running_var=float("nan")), "running_var is not finite at channel 2"),
        (norm(running_var=float("inf")), "running_var is not finite at channel 2"),
        (norm(running_mean=float("nan")), "running_mean is not finite at channel 2"),
        (norm(running_var=-1e-5).double(), "running_var + eps <= 0 at channel 2"),
        (NormAct(4), "NormAct has a forward of its own"),
        (hooked(nn.BatchNorm2d(4)), "it has hooks, which a fused site would drop"),
        (
            nn.BatchNorm2d(4, track_running_stats=False),
            "no running statistics: it normalises by the batch in eval mode too",
        ),
    ],
)
def test_bn_reasons(bn: nn.Module, reason: str) -> None:
    assert bn_reason(bn) == reason


def test_zero_variance_is_worth_a_word() -> None:
    assert scale_note(nn.BatchNorm2d(4)) == ""
    assert scale_note(norm(running_var=0.0)) == "channel 2 is scaled by 316"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d], ids=["conv", "transposed"])
def test_folding(conv: Any, bias: bool) -> None:
    torch.manual_seed(0)
    layer = conv(4, 6, 3, groups=2, bias=bias).double().eval()
    bn = randomize(nn.BatchNorm2d(6)).double().eval()
    x = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    site = to_site(layer, bn)
    torch.testing.assert_close(site(x), bn(layer(x)), rtol=1e-12, atol=1e-12)
    assert not list(site.parameters()) and not site.training
    torch.testing.assert_close(to_site(layer)(x), layer(x), rtol=1e-12, atol=1e-12)


def test_site_owns_its_tensors_and_keeps_dtype_and_layout() -> None:
    layer = last(nn.Conv2d(4, 6, 3).bfloat16())
    for site in (to_site(layer), to_site(layer, nn.BatchNorm2d(6))):
        assert site.weight.dtype == torch.bfloat16
        assert site.weight.is_contiguous(memory_format=torch.channels_last)
        assert site.weight.data_ptr() != layer.weight.data_ptr()


def test_twin_shares_everything() -> None:
    site = to_site(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    site.adapt(2, torch.Generator())
    twin = tied_twin(site.eval())
    assert twin.U is site.U and not twin.training
    assert all(getattr(twin, n) is getattr(site, n) for n in ("weight", "bias", "scale", "P"))
