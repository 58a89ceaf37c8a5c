"""Geometry: string paddings, adjoints, and gradients against autograd of torch's own convs."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from floorplan.layers.geometry import (
    Geometry,
    conv,
    conv1x1,
    conv_input_grad,
    conv_weight_grad,
    frozen_conv,
    geometry_of,
    pad,
    padded_size,
    unpad,
)

MODES = ["zeros", "reflect", "replicate", "circular"]


def test_config_round_trip() -> None:
    for c in (nn.Conv2d(3, 4, (3, 2), padding="same"), nn.ConvTranspose1d(4, 4, 3, 2, 1, 1, 2)):
        geo = geometry_of(c)
        assert Geometry.of(geo.config()) == geo


@pytest.mark.parametrize(
    "layer,padding",
    [
        (nn.Conv1d(1, 1, 4, padding="same"), ((1, 2),)),
        (nn.Conv1d(1, 1, 4, padding="same", dilation=3), ((4, 5),)),
        (nn.Conv2d(1, 1, (3, 2), padding="same"), ((1, 1), (0, 1))),
        (nn.Conv2d(1, 1, 3, padding="valid"), ((0, 0), (0, 0))),
        (nn.Conv2d(1, 1, 3, padding=(1, 2)), ((1, 1), (2, 2))),
    ],
)
def test_string_paddings(layer: nn.Module, padding: Any) -> None:
    assert geometry_of(layer).padding == padding


def test_kinds() -> None:
    pointwise, sampled = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1, stride=(1, 2))
    others = [nn.Conv2d(1, 1, 1, padding=1), nn.Conv2d(1, 1, (1, 3)), nn.ConvTranspose2d(1, 1, 1, 2)]
    kinds = [(g.pointwise, g.sampled) for g in map(geometry_of, [pointwise, sampled, *others])]
    assert kinds == [(True, False), (False, True), (False, False), (False, False), (False, False)]
    assert geometry_of(nn.Conv2d(1, 1, 3, padding_mode="reflect")).native  # pads nothing
    assert not geometry_of(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")).native


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MODES), st.integers(1, 3))
def test_unpad_is_the_adjoint_of_pad(data: st.DataObject, mode: str, nd: int) -> None:
    size = data.draw(st.lists(st.integers(4, 6), min_size=nd, max_size=nd))
    side = st.integers(0, 3)
    padding = tuple((data.draw(side), data.draw(side)) for _ in size)
    one = (1,) * nd
    geo = Geometry(one, one, padding, mode, one, 1, False, (0,) * nd)
    if geo.native:
        return
    torch.manual_seed(0)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    y = pad(x, geo)
    assert list(y.shape[2:]) == padded_size(x.shape, geo)
    g = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(unpad(g, geo), want, rtol=1e-12, atol=1e-12)


def gradients(layer: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    layer, x = layer.double(), x.double().requires_grad_()
    geo = geometry_of(layer)
    y = layer(x)
    torch.manual_seed(1)
    g = torch.randn_like(y)
    want = [y.detach(), *torch.autograd.grad(y, [x, layer.weight], g)]
    w, xp = layer.weight.detach(), pad(x.detach(), geo)
    gx = conv_input_grad(g, w, padded_size(x.shape, geo), geo, geo.groups)
    gw = conv_weight_grad(g, xp, w, geo, geo.groups)
    return [conv(xp, w, layer.bias.detach(), geo, geo.groups), unpad(gx, geo), gw], want


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.sampled_from(MODES),
    st.integers(5, 8),
    st.data(),
)
def test_gradients_are_autograds(
    transposed: bool,
    nd: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    mode: str,
    size: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(0)
    if transposed:
        out = data.draw(st.integers(0, max(stride, dilation) - 1))
        make = (nn.ConvTranspose1d, nn.ConvTranspose2d)[nd - 1]
        layer: Any = make(4, 6, kernel, stride, 0, out, groups, True, dilation)
    else:
        if dilation * (kernel - 1) + 1 > size:
            return
        convs = (nn.Conv1d, nn.Conv2d)[nd - 1]
        layer = cast(Any, convs)(4, 6, kernel, stride, padding, dilation, groups, padding_mode=mode)
    for got, want in zip(*gradients(layer, torch.randn(2, 4, *[size] * nd)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_expanded_gradient() -> None:
    layer = nn.Conv2d(4, 6, 3, 2, 1).double()
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    (want,) = torch.autograd.grad(y.sum(), x)
    g = torch.ones((), dtype=torch.float64).expand(y.shape)
    geo = geometry_of(layer)
    got = conv_input_grad(g, layer.weight.detach(), x.shape[2:], geo, 1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_input_grad_of_a_transposed_conv_that_pads_its_output_past_a_stride() -> None:
    """Its adjoint reads positions that no input made; as many channels as positions, so that no axis is confused."""
    layer = nn.ConvTranspose2d(4, 6, 2, 1, 0, (0, 2), dilation=3)
    for got, want in zip(*gradients(layer, torch.randn(2, 4, 5, 4)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


POSITIVE = "kernel, stride, dilation and groups are positive"
SMALLER = "output_padding is smaller than stride or dilation"


@pytest.mark.parametrize(
    "changed,why",
    [
        ({"kernel": [0, 3]}, POSITIVE),
        ({"stride": [1.0, 1]}, POSITIVE),
        ({"dilation": [True, 1]}, POSITIVE),
        ({"groups": -1}, POSITIVE),
        ({"output_padding": [0, 2]}, SMALLER),
        ({"output_padding": [-1, 0]}, SMALLER),
        ({"output_padding": [0.0, 0]}, SMALLER),
        ({"output_padding": [0, 1]}, ""),
        ({"output_padding": [2, 0], "dilation": [3, 1]}, ""),
    ],
    ids=str,
)
def test_what_no_convolution_has_is_refused(changed: dict[str, Any], why: str) -> None:
    config = geometry_of(nn.ConvTranspose2d(2, 2, 3, 2)).config() | changed
    if not why:
        assert Geometry.of(config).config() == config
        return
    with pytest.raises(ValueError, match=f"^{why}$"):
        Geometry.of(config)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect", bias=False),
        nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
        nn.Conv1d(4, 6, 3),
    ],
    ids=str,
)
def test_a_frozen_conv_gives_gradients_of_its_input_and_bias_alone(layer: Any) -> None:
    layer = layer.double()
    layer.weight.requires_grad_(False)
    x = torch.randn(2, 4, *[7, 8][: len(layer.kernel_size)], dtype=torch.float64, requires_grad=True)
    leaves = [x] if layer.bias is None else [x, layer.bias]
    y, want = frozen_conv(x, layer.weight, layer.bias, geometry_of(layer)), layer(x)
    torch.testing.assert_close(y, want)
    g = torch.randn_like(y)
    for got, other in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(got, other)
    if layer.bias is not None:
        alone = frozen_conv(x.detach(), layer.weight, layer.bias, geometry_of(layer))
        torch.testing.assert_close(torch.autograd.grad(alone, layer.bias, g)[0], g.sum((0, *range(2, g.dim()))))
        layer.bias.requires_grad_(False)
    (gx,) = torch.autograd.grad(frozen_conv(x, layer.weight, layer.bias, geometry_of(layer)), x, g)
    torch.testing.assert_close(gx, torch.autograd.grad(layer(x), x, g)[0])


@pytest.mark.parametrize("groups", [1, 2])
def test_conv1x1_by_a_matrix(groups: int) -> None:
    x, w = torch.randn(2, 4, 3, 5, dtype=torch.float64), torch.randn(6, 4 // groups, dtype=torch.float64)
    want = torch.nn.functional.conv2d(x, w[:, :, None, None], groups=groups)
    torch.testing.assert_close(conv1x1(x, w, groups), want)
    torch.testing.assert_close(conv1x1(x, w[:, :, None, None], groups), want)


def test_a_geometry_is_data_and_back() -> None:
    geo = geometry_of(nn.Conv2d(3, 4, 3, padding=(1, 2)))
    assert geo.config()["padding"] == [[1, 1], [2, 2]] and Geometry.of(geo.config()) == geo
