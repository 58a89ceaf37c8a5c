"""The ablations of MemFLoRA: a branch beside the site, how P is drawn, and the scale left out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import golden, kept_bytes, randomize, run_passes, show
from torch import Tensor, fx, nn

import floorplan
from floorplan import passes
from floorplan.errors import FloorplanError
from floorplan.graph.driver import Pass, Site, rewrite
from floorplan.layers.branch import RankBranch
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.passes import fold_batchnorm
from floorplan.passes.insert_branch import branch
from floorplan.passes.insert_memflora import memflora

X = torch.randn(2, 8, 6, 5)
ABLATIONS = [
    "memflora-orthogonal",
    "memflora-orthogonal-matched",
    "memflora-noscale",
    "memflora-bnr",
    "memflora-kernel-down",
]


class Net(nn.Module):
    """A conv with its BatchNorm and ReLU, a residual of two convs, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True))
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, padding="same"), nn.BatchNorm2d(8))
        self.short, self.relu, self.head = nn.Conv2d(8, 8, 1), nn.ReLU(True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        y += self.short(x)
        out: Tensor = self.head(self.relu(y).mean((2, 3)))
        return out


def unverified(model: nn.Module, *line: Pass) -> fx.GraphModule:
    """Quick: what is drawn needs no check of outputs."""
    gm = fx.symbolic_trace(model.double())
    return rewrite(gm, [fold_batchnorm.PASS, *line], lambda *a: None)[0]


def insert(model: nn.Module, **options: Any) -> tuple[fx.GraphModule, list[Site]]:
    return run_passes(randomize(model), [fold_batchnorm.PASS, branch(**options)], X)


def test_branches_stand_beside_their_sites() -> None:
    gm, log = insert(nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    assert (
        show(gm, log)
        == """\
input_1 = input()
_0_branch = RankBranch(input_1)
_0 = FusedConv(input_1)
add = add(_0, _0_branch)
_2 = ReLU(add)
_3_branch = RankBranch(_2)
_3 = FusedConv(_2)
add_1 = add(_3, _3_branch)
output = output(add_1)"""
    )
    assert [n for n, p in gm.named_parameters() if p.requires_grad] == ["0_branch.U", "3_branch.U"]
    forms = [m.form for m in gm.modules() if isinstance(m, RankBranch)]
    assert forms == ["a", "none"]  # there is no BatchNorm behind the second
    assert all(m.scale is None for m in gm.modules() if isinstance(m, FusedConv))


@pytest.mark.parametrize("kernel,bn", [("up", True), ("down", False)])
def test_the_site_takes_the_branch_as_its_skip(kernel: str, bn: bool) -> None:
    line = passes.pipeline(branch(kernel=kernel, bn=bn))
    gm, _ = run_passes(randomize(Net()), line, X)
    assert (
        show(gm, [])
        == """\
x = x()
a_0_branch = RankBranch(x)
a_0 = FusedConv[ReLU](x, a_0_branch)
b_0_branch = RankBranch(a_0)
b_0 = FusedConv(a_0, b_0_branch)
short_branch = RankBranch(a_0)
short = FusedConv(a_0, short_branch)
add = add(b_0, short)
relu = PackedActivation[ReLU](add)
mean = mean(relu, (2, 3))
head = Linear(mean)
output = output(head)"""
    )
    # Three q of two channels (BatchNorm keeps q once more), two gates, and parts without a batch.
    q, gates = 3 * 8 * 2 * 2 * 30 * (2 if bn else 1), 2 * 2 * 8 * 30 // 8
    rest = 3 * 2 * 2 * 8 if bn else 2 * 8 * 2 * 8  # batch statistics, or a*U of two sites
    assert kept_bytes(gm.train(), X.double()) == q + gates + rest


def test_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 8, 1, groups=8)
    )
    gm, log = insert(model, sites="all")
    assert [(s.node, s.refused) for s in log if s.refused] == [
        ("1", "a branch of two convs is defined for ungrouped convs; this one has 2 groups; frozen"),
        ("2", "a branch of two convs is defined for convs, not for transposed ones; frozen"),
        ("3", "depthwise: one input channel a group, so q would be as wide as the input; frozen"),
    ]
    assert sum(isinstance(m, RankBranch) for m in gm.modules()) == 1
    with pytest.raises(FloorplanError, match="^no conv was adapted"):
        insert(nn.Sequential(nn.ConvTranspose2d(8, 8, 2)))


def test_a_shared_conv_has_one_branch() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))  # type: ignore[no-any-return]

    gm, log = run_passes(Twice(), passes.pipeline(branch()), X)
    assert [n for n, _ in gm.named_parameters()] == ["conv_branch.U"]
    assert sum(n.target == "conv_branch" for n in gm.graph.nodes) == 2


def test_p_is_normal_and_seeded() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 64, 3), nn.Conv2d(64, 8, 3))
    for kernel in ("up", "down"):
        draws = [unverified(model, branch(rank=4, seed=s, kernel=kernel)).state_dict() for s in (0, 0, 1)]
        assert all(torch.equal(draws[0][k], draws[1][k]) for k in draws[0])
        assert not torch.equal(draws[0]["2_branch.P"], draws[2]["2_branch.P"])
        assert not draws[0]["1_branch.U"].any()
        assert float(draws[0]["2_branch.P"].std()) == pytest.approx(0.5, rel=0.15)  # 1/sqrt(4)


def projections(**options: Any) -> list[Tensor]:
    model = nn.Sequential(nn.Conv2d(8, 12, 1), nn.Conv2d(12, 12, 3, groups=3), nn.ConvTranspose2d(12, 4, 2))
    gm = unverified(model, memflora(rank=3, sites="all", **options))
    return [m.P for m in gm.modules() if isinstance(m, FusedConv) and m.P is not None]


@pytest.mark.parametrize("projection", ["orthogonal", "orthogonal-matched"])
def test_orthonormal_rows(projection: str) -> None:
    found = projections(projection=projection)
    assert [tuple(p.shape) for p in found] == [(1, 3, 8), (3, 3, 4), (1, 3, 12)]
    for p in found:
        square = 1.0 if projection == "orthogonal" else p.shape[2] / 3
        want = square * torch.eye(3, dtype=p.dtype).expand(len(p), 3, 3)
        torch.testing.assert_close(p @ p.transpose(1, 2), want, rtol=0, atol=1e-12)
    again, other = projections(projection=projection), projections(projection=projection, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found, other, strict=True))


def test_rows_have_no_preferred_direction() -> None:
    g = torch.Generator().manual_seed(0)
    site = FusedConv(fold_geometry(), [4, 3, 1, 1])
    total = torch.zeros(3)
    for _ in range(400):
        site.adapt(1, g, "orthogonal")
        assert site.P is not None
        total += site.P[0, 0]
    assert float(total.abs().max()) / 400 < 4 / math.sqrt(3 * 400)


def fold_geometry() -> dict[str, Any]:
    return geometry_of(nn.Conv2d(3, 4, 1)).config()


def test_without_the_scale() -> None:
    a: Any = randomize(nn.BatchNorm2d(6))
    model = nn.Sequential(nn.Conv2d(8, 6, 3), a)
    for scaled in (True, False):
        gm, _ = run_passes(model, [fold_batchnorm.PASS, memflora(scaled=scaled)], X)
        site = gm.get_submodule("0")
        assert isinstance(site, FusedConv) and site.U is not None and site.P is not None
        nn.init.normal_(site.U)
        delta = torch.einsum("orhw,ri->oihw", site.U.detach(), site.P[0])
        if scaled:
            delta = delta * (a.weight / (a.running_var + a.eps).sqrt()).detach().double()[:, None, None, None]
        torch.testing.assert_close(site.merged(torch.float64).detach(), site.weight + delta)


@pytest.mark.parametrize("method", ABLATIONS)
def test_from_rewrite_to_file(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomize(Net())
    result = floorplan.rewrite(model, X, method=method)
    assert set((result.report.after.difference or {}).values()) == {0}
    torch.testing.assert_close(result.module.eval()(X), model.eval()(X))
    floorplan.save(result.module, tmp_path / "a.pt")
    again = floorplan.load(tmp_path / "a.pt")
    assert torch.equal(again.eval()(X), result.module(X))
    trained = [[n for n, p in m.named_parameters() if p.requires_grad] for m in (again, result.module)]
    assert trained[0] == trained[1] and len(trained[0]) == (9 if method == "memflora-bnr" else 3)


def test_golden() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    golden(
        [fold_batchnorm.PASS, branch()],
        model,
        X,
        """\
input_1 = input()
_0_branch = RankBranch(input_1)  trains U  saves float64[2, 2, 6, 5], float64[4, 2, 3, 3]
_0 = FusedConv(input_1)
add = add(_0, _0_branch)
_2 = ReLU(add)  saves _2[2, 4, 4, 3]
output = output(_2)""",
    )
    golden(
        [fold_batchnorm.PASS, branch(kernel="down", bn=True)],
        model,
        X,
        """\
input_1 = input()
_0_branch = RankBranch(input_1)  trains U, norm.weight, norm.bias  saves float64[2, 2, 4, 3], float64[2, 2, 4,
    3]
_0 = FusedConv(input_1)
add = add(_0, _0_branch)
_2 = ReLU(add)  saves _2[2, 4, 4, 3]
output = output(_2)""",
    )


def test_golden_refusals() -> None:
    grouped, up = nn.Conv2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 8, 2)
    golden(
        [branch(sites="all")],
        nn.Sequential(nn.Conv2d(8, 8, 1), grouped, up),
        X,
        """\
input_1 = input()
_0_branch = RankBranch(input_1)  trains U  saves float64[2, 2, 6, 5]
_0 = FusedConv(input_1)
add = add(_0, _0_branch)
_1 = FusedConv(add)
_2 = FusedConv(_1)
output = output(_2)
# 1: a branch of two convs is defined for ungrouped convs; this one has 2 groups; frozen
# 2: a branch of two convs is defined for convs, not for transposed ones; frozen""",
    )
