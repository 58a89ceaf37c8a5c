"""The compact-pools pass: what it replaces, what it refuses, what is kept afterwards."""

import pytest
import torch
from graphs import golden
from hard_nets import Lambda
from torch import fx, nn

from floorplan.graph.driver import Pass, rewrite
from floorplan.layers.pools import PackedMaxPool, ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.passes import compact_pools


def agree(_: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = before(a), after(b)
    y, z = (y[0], z[0]) if isinstance(y, tuple) else (y, z)
    assert torch.equal(y, z)
    assert torch.equal(*[torch.autograd.grad(o.square().sum(), i)[0] for o, i in ((y, a), (z, b))])


def run(model: nn.Module) -> tuple[fx.GraphModule, dict[str, str]]:
    gm, log = rewrite(fx.symbolic_trace(model), [compact_pools.PASS], agree)
    return gm, {s.node: s.refused for s in log["compact_pools"]}


def test_every_pool_with_a_twin_is_replaced() -> None:
    pools = (nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2))
    gm, log = run(nn.Sequential(*pools))
    assert log == {"_0": "", "_1": "", "_2": ""}
    kinds = [type(gm.get_submodule(str(i))) for i in range(3)]
    assert kinds == [PackedMaxPool, ShapeAvgPool, ShapeAdaptiveAvgPool]


@pytest.mark.parametrize(
    "pool,reason",
    [
        (nn.MaxPool2d(2, return_indices=True), "set return_indices=False"),
        (nn.AdaptiveMaxPool2d(3), "fixed kernel"),
        (nn.MaxPool2d((12, 12), padding=6), ""),
        (nn.LPPool2d(2, 3), "neither a maximum nor a mean"),
    ],
    ids=str,
)
def test_refusals(pool: nn.Module, reason: str) -> None:
    gm, log = run(nn.Sequential(pool))
    assert reason in log["_0"] and bool(reason) == bool(log["_0"])
    assert (type(gm.get_submodule("0")) is type(pool)) == bool(reason)


def test_a_window_over_256_positions_is_refused() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.MaxPool2d(17)))
    (site,) = compact_pools.PASS.run(gm)
    assert site.refused == "MaxPool2d has 289 window positions, more than 256; use a smaller kernel"


def test_bytes_kept_by_a_pooled_stem() -> None:
    gm, _ = run(nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(3, 1)))
    saved: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gm(torch.randn(3, 5, 14, 14, requires_grad=True))
    assert saved == [(3 * 5 * 49 * 2 + 7) // 8]


def test_golden() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))
    golden(
        [compact_pools.PASS],
        model,
        torch.randn(2, 3, 8, 8),
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains weight, bias  saves input_1[2, 3, 8, 8]
_1 = PackedMaxPool(_0)  saves uint8[32]
_2 = ShapeAvgPool(_1)
_3 = ShapeAdaptiveAvgPool(_2)
output = output(_3)""",
    )


def test_golden_refusals() -> None:
    pools = dict(i=nn.MaxPool2d(2, return_indices=True), w=nn.MaxPool2d(17), a=nn.AdaptiveMaxPool2d(3))
    model = Lambda(
        lambda m, x: (m.i(x)[0], m.w(x), m.a(x), m.p(x), m.f(x)),
        **pools,
        p=nn.LPPool2d(2, 3),
        f=nn.FractionalMaxPool2d(2, 3),
    )
    golden(
        [compact_pools.PASS],
        model,
        torch.randn(1, 1, 18, 18),
        """\
x = x()
i = MaxPool2d(x)
getitem = getitem(i, 0)
w = MaxPool2d(x)
a = AdaptiveMaxPool2d(x)
p = LPPool2d(x)
f = FractionalMaxPool2d(x)
output = output((getitem, w, a, p, f))
# i: MaxPool2d returns its indices, which are int64; set return_indices=False
# w: MaxPool2d has 289 window positions, more than 256; use a smaller kernel
# a: AdaptiveMaxPool2d cannot be packed, its windows differ in size with the input's; use a MaxPool with a fixed
    kernel
# p: LPPool2d cannot be packed, it is neither a maximum nor a mean; use MaxPool or AvgPool
# f: FractionalMaxPool2d cannot be packed, its windows are drawn at random; use a MaxPool with a fixed kernel""",
    )
