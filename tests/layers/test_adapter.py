"""Layers in the place of a conv: how factors start, which are found, and what a subclass need not say."""

import math

import torch
from torch import Tensor, nn

from floorplan.layers.adapter import ConvAdapter, adapter_rank, adapters, as_conv_starts, zero_factors
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import geometry_of


class Scaled(ConvAdapter):
    """A trained number a row of the weight: all that a subclass has to say."""

    starts_at_zero = ("U",)

    def make(self, weight: list[int]) -> None:
        self.U = nn.Parameter(torch.zeros(weight[0], *[1] * (len(weight) - 1)))

    def start(self, generator: torch.Generator) -> None:
        self.started = True

    def delta(self) -> Tensor:
        return self.scale * self.U * self.weight


def test_a_conv_starts_as_torchs() -> None:
    drawn = as_conv_starts((6, 4, 3, 3), torch.Generator().manual_seed(0))
    bound = 1 / math.sqrt(4 * 9)
    assert drawn.dtype == torch.float64 and drawn.shape == (6, 4, 3, 3)
    assert -bound <= drawn.min() < -0.9 * bound and 0.9 * bound < drawn.max() < bound
    reference = nn.Conv2d(4, 6, 3).weight.detach()
    assert abs(float(drawn.std()) / (bound / math.sqrt(3)) - 1) < 0.1 and reference.abs().max() <= bound


def test_a_layer_of_a_conv_computes_what_the_conv_does_until_it_is_trained() -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect").double().eval()
    layer = Scaled.of(conv, 2, torch.Generator(), scale=0.5)
    assert isinstance(layer, Scaled) and layer.started and not layer.training
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    assert torch.equal(layer(x), conv(x)) and torch.equal(layer(x[0]), conv(x)[0])
    assert layer.weight is not conv.weight and list(dict(layer.named_parameters())) == ["U"]
    with torch.no_grad():
        layer.U.fill_(1.0)
    torch.testing.assert_close(layer.merged(), conv.weight * 1.5)
    plain = layer.plain_form()
    assert torch.equal(plain.weight, layer.merged()) and plain.bias is layer.bias and plain.act is None
    again = Scaled(**layer.config())
    assert again.config() == layer.config() and repr(again) == repr(layer)


def test_what_a_form_does_not_exist_for() -> None:
    generator = torch.Generator()
    assert Scaled.of(nn.ConvTranspose2d(4, 4, 2), 2, generator) == "is defined for convs, not for transposed ones"
    assert Scaled.of(nn.Conv2d(4, 4, 2, groups=2), 2, generator) == "is defined for ungrouped convs"


def test_adapters_of_a_model_and_their_zero_factors() -> None:
    config = geometry_of(nn.Conv2d(4, 4, 1)).config()
    a, frozen = FusedConv(config, [4, 4, 1, 1], rank=2), FusedConv(config, [4, 4, 1, 1])
    twin = FusedConv(config, [4, 4, 1, 1], rank=2)
    twin.U = a.U
    other = Scaled.of(nn.Conv2d(4, 4, 1), 3, torch.Generator())
    assert isinstance(other, Scaled)
    model = nn.ModuleDict({"a": a, "frozen": frozen, "twin": twin, "b": nn.ModuleList([other])})
    assert adapters(model) == [("a", a), ("twin", twin), ("b.0", other)]
    assert zero_factors(model) == {"a.U": a.U, "b.0.U": other.U} and zero_factors(a) == {"U": a.U}
    assert adapter_rank(model) == 3 and adapter_rank(frozen) is None
