"""The adapter's algebra against einsum."""

import pytest
import torch
from torch import nn

from floorplan.layers.geometry import geometry_of
from floorplan.layers.lowrank import merge, project, project_grad, scaled


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_merge(transposed: bool, groups: int, kernel: int, last: bool) -> None:
    torch.manual_seed(0)
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = make(4, 6, kernel, groups=groups).double()
    geo, w = geometry_of(layer), layer.weight.detach()
    w = w.contiguous(memory_format=torch.channels_last) if last else w
    p = torch.randn(groups, 3, 4 // groups, dtype=torch.float64)
    scale = torch.randn(6, dtype=torch.float64)
    k = (kernel, kernel)
    if transposed:
        u = torch.randn(groups, 3, 6 // groups, *k, dtype=torch.float64)
        d = torch.einsum("grojk,gri,go->giojk", u, p, scale.view(groups, -1))
    else:
        u = torch.randn(6, 3, *k, dtype=torch.float64)
        d = torch.einsum("gorjk,gri,go->goijk", u.view(groups, -1, 3, *k), p, scale.view(groups, -1))
    got = merge(w, u, p, scale, geo)
    torch.testing.assert_close(got, w + d.reshape(w.shape), rtol=1e-12, atol=1e-12)
    if last and kernel > 1 and not transposed:
        assert got.is_contiguous(memory_format=torch.channels_last)


def test_merge_in_the_wider_dtype() -> None:
    geo, w = geometry_of(nn.Conv2d(4, 6, 1)), torch.ones(6, 4, 1, 1, dtype=torch.bfloat16)
    u, p = torch.full((6, 1, 1, 1), 1e-4), torch.ones(1, 1, 4, dtype=torch.bfloat16)
    assert merge(w, u, p, None, geo).dtype == torch.float32
    assert torch.equal(merge(w, u, p, None, geo), torch.full((6, 4, 1, 1), 1 + 1e-4))


def test_scaled_without_a_scale_is_the_same_tensor() -> None:
    u = torch.randn(6, 2, 1, 1)
    assert scaled(u, None, geometry_of(nn.Conv2d(4, 6, 1))) is u


@pytest.mark.parametrize("groups,stride", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_project(groups: int, stride: int) -> None:
    torch.manual_seed(0)
    geo = geometry_of(nn.Conv2d(4, 6, 1, stride, groups=groups))
    p, x = torch.randn(groups, 3, 4 // groups), torch.randn(2, 4, 5, 7)
    want = torch.einsum("gri,bgihw->bgrhw", p, x.view(2, groups, -1, 5, 7)).flatten(1, 2)
    for fmt in (torch.contiguous_format, torch.channels_last):
        got = project(x.contiguous(memory_format=fmt), p, geo)
        torch.testing.assert_close(got, want[:, :, ::stride, ::stride])


def test_merge_of_volumes_laid_out_last() -> None:
    torch.manual_seed(0)
    layer = nn.Conv3d(4, 6, (1, 2, 3)).double()
    w = layer.weight.detach().contiguous(memory_format=torch.channels_last_3d)
    p, u = torch.randn(1, 2, 4, dtype=torch.float64), torch.randn(6, 2, 1, 2, 3, dtype=torch.float64)
    got = merge(w, u, p, None, geometry_of(layer))
    torch.testing.assert_close(got, w + torch.einsum("orxyz,gri->oixyz", u, p), rtol=1e-12, atol=1e-12)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("groups,stride", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_project_grad_is_autograds(groups: int, stride: int) -> None:
    torch.manual_seed(0)
    geo = geometry_of(nn.Conv2d(4, 6, 1, stride, groups=groups))
    p = torch.randn(groups, 3, 4 // groups, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    q = project(x, p, geo)
    gq = torch.randn_like(q)
    (want,) = torch.autograd.grad(q, p, gq)
    torch.testing.assert_close(project_grad(x, gq, p.detach(), geo), want, rtol=1e-12, atol=1e-12)
    assert project_grad(x.float(), gq, p.detach().float(), geo).dtype == torch.float32
