"""RankBranch against plain convs, and what it keeps: q, never the input."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from saves import close, drawn, handed
from torch import Tensor, nn

from floorplan.layers.branch import RankBranch
from floorplan.layers.geometry import geometry_of

RANK = 2
CASES = [
    (nn.Conv1d(6, 8, 5, padding=2), (6, 17)),
    (nn.Conv2d(4, 6, 1), (4, 5, 7)),
    (nn.Conv2d(4, 6, 1, stride=2), (4, 6, 7)),
    (nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 4), (1, 2), padding_mode="circular"), (4, 9, 9)),
    (nn.Conv2d(4, 6, (2, 4), padding="same"), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (4, 7, 8)),
    (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=1), (4, 4, 5, 6)),
]
FORMS = [("up", "a"), ("up", "none"), ("up", "bn"), ("down", "a"), ("down", "none"), ("down", "bn")]


def shapes(m: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in handed(m, x)]


def branch_of(conv: Any, kernel: str, scale: str) -> RankBranch:
    torch.manual_seed(1)
    branch = RankBranch(geometry_of(conv).config(), list(conv.weight.shape), RANK, kernel, scale).double()
    branch.P, branch.U.data = drawn(*branch.P.shape), drawn(*branch.U.shape)
    if branch.scale is not None:
        branch.scale = drawn(*branch.scale.shape)
    return branch


def reference(branch: RankBranch, conv: Any, x: Tensor, u: Tensor, norm: Any) -> Tensor:
    """By torch's own layers: one conv of the layer's kind, one 1x1 conv."""
    options = {n: getattr(conv, n) for n in ("stride", "padding", "dilation", "padding_mode")}
    down = branch.kernel == "down"
    i, o = (conv.in_channels, RANK) if down else (RANK, conv.out_channels)
    wide = type(conv)(i, o, conv.kernel_size, bias=False, **options).double()
    wide.weight = nn.Parameter(branch.P.clone())
    one = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.dim() - 2]
    if down:
        q = wide(x)
        q = q if norm is None else norm(q)
        d = one(q, u)
    else:
        q = one(x, branch.P)
        q = q if norm is None else norm(q)
        d = torch.func.functional_call(wide, {"weight": u}, (q,))
    return d if branch.scale is None else d * branch.scale.reshape(1, -1, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("kernel,scale", FORMS)
@pytest.mark.parametrize("conv,shape", CASES, ids=str)
def test_values_and_gradients(conv: Any, shape: tuple[int, ...], kernel: str, scale: str) -> None:
    branch = branch_of(conv, kernel, scale)
    norm = copy.deepcopy(branch.norm)
    x, u = drawn(3, *shape).requires_grad_(), branch.U.detach().clone().requires_grad_()
    got, want = branch(x), reference(branch, conv, x, u, norm)
    close(got, want)
    g = drawn(*want.shape)
    extra = [] if norm is None else list(norm.parameters())
    wanted = torch.autograd.grad(want, [x, u, *extra], g)
    mine = [x, *branch.parameters()]
    assert len(mine) == len(wanted)
    for a, b in zip(torch.autograd.grad(got, mine, g), wanted, strict=True):
        close(a, b)


@pytest.mark.parametrize("kernel", ["up", "down"])
@pytest.mark.parametrize("conv,shape", CASES, ids=str)
def test_keeps_q_alone(conv: Any, shape: tuple[int, ...], kernel: str) -> None:
    branch = branch_of(conv, kernel, "none")
    x = drawn(3, *shape).requires_grad_()
    raw = [3, RANK, *(branch(x).shape[2:] if kernel == "down" else shape[1:])]
    padded = list(raw)
    if kernel == "up" and not branch.geo.native:
        padded[2:] = [n + lo + hi for n, (lo, hi) in zip(raw[2:], branch.geo.padding, strict=True)]
    # A reflecting pad keeps its input as well: r channels once more.
    twice = kernel == "up" and branch.geo.mode == "reflect"
    kept = [tuple(raw), tuple(padded)] if twice else [tuple(padded)]
    assert shapes(branch, x) == kept
    assert shapes(branch, x.detach()) == [tuple(padded)]
    scaled = shapes(branch_of(conv, kernel, "a"), x)  # and a*U, which has no batch in it
    assert sorted(scaled) == sorted([*kept, tuple(branch.U.shape)])
    normed = [s for s in shapes(branch_of(conv, kernel, "bn"), x) if len(s) > 1]
    assert sorted(normed) == sorted([tuple(raw), *kept])  # BatchNorm keeps q before, the conv after it


@pytest.mark.parametrize("conv,shape", CASES, ids=str)
def test_delta_is_what_the_branch_adds_to_the_weight(conv: Any, shape: tuple[int, ...]) -> None:
    x = drawn(2, *shape)
    for kernel in ("up", "down"):
        for scale in ("a", "none"):
            branch = branch_of(conv, kernel, scale)
            plain = copy.deepcopy(conv).double()
            plain.weight, plain.bias = nn.Parameter(branch.delta()), None
            close(branch(x), plain(x))


def test_starts_at_zero_and_rebuilds() -> None:
    conv, x = nn.Conv2d(4, 6, 3, padding=1), drawn(2, 4, 5, 5)
    for kernel, scale in FORMS:
        branch = branch_of(conv, kernel, scale)
        twin = RankBranch(**branch.config()).double()
        assert not twin(x).any() and twin.config() == branch.config()
        twin.load_state_dict(branch.state_dict())
        assert torch.equal(twin.eval()(x), branch.eval()(x))
        norm = dict.fromkeys(["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"], "r")
        assert branch.axes() == {"P": "rC", "U": "Cr", **(norm if scale == "bn" else {})}
    assert branch_of(conv, "down", "a").U.shape == (6, RANK, 1, 1)
