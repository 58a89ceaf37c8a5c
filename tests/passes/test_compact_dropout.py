"""The compact-dropout pass: same random numbers, fewer bits, reasons for the rest."""

import torch
from expecttest import assert_expected_inline
from graphs import picture
from hard_nets import Lambda
from torch import Tensor, fx, nn

from floorplan.graph.driver import Pass, rewrite
from floorplan.layers.dropout import PackedDropout
from floorplan.passes import compact_dropout


def agree(_: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    results = []
    for gm in (before, after):
        z = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = gm(z * 1)
        results.append((y, torch.autograd.grad(y.square().sum(), z)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def run(model: nn.Module) -> tuple[fx.GraphModule, dict[str, str]]:
    gm, log = rewrite(fx.symbolic_trace(model), [compact_dropout.PASS], agree)
    return gm, {s.node: s.refused for s in log["compact_dropout"]}


def test_dropouts_are_replaced_and_draw_the_same() -> None:
    gm, log = run(nn.Sequential(nn.Dropout(0.3, inplace=True), nn.Dropout2d(0.5), nn.Dropout(0.0)))
    assert log == {"_0": "", "_1": "", "_2": ""}
    assert [type(m) for m in gm.children()] == [PackedDropout] * 3


def test_mode_follows_the_module() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout(0.9))
    model[1].eval()
    gm, _ = run(model)
    assert [m.training for m in gm.children()] == [True, False]
    x = torch.randn(4, 4)
    assert torch.equal(gm.eval()(x), x)
    assert not torch.equal(gm.train()(x), x)


def test_alpha_dropout_is_refused() -> None:
    gm, log = run(nn.Sequential(nn.AlphaDropout(0.1), nn.Dropout(0.1)))
    assert "use Dropout" in log["_0"] and log["_1"] == ""
    assert type(gm.get_submodule("0")) is nn.AlphaDropout


def test_input_read_again_after_an_in_place_dropout_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5, inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x) + x  # type: ignore[no-any-return]

    _, log = run(Reads())
    assert log == {"drop": "add reads what drop writes in place; set inplace=False"}


def test_bytes_kept() -> None:
    gm, _ = run(nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5)))
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gm(torch.randn(3, 5, 7, 7, requires_grad=True))
    assert saved == [(3 * 5 * 49 + 7) // 8, 2]


def test_golden() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.1), nn.Dropout2d(0.1))
    gm, log = rewrite(fx.symbolic_trace(model), [compact_dropout.PASS], lambda *a: None)
    text = picture(gm.train(), log["compact_dropout"], torch.randn(2, 3, 6, 5))
    assert_expected_inline(
        text,
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains weight, bias  saves input_1[2, 3, 6, 5]
_1 = PackedDropout(_0)  saves uint8[30]
_2 = PackedDropout(_1)  saves uint8[1]
output = output(_2)""",
    )


def read_again(m: Lambda, x: Tensor) -> Tensor:
    y = m.c(x)
    return m.drop(y) + y  # type: ignore[no-any-return]


def test_golden_refusals() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1))
    gm, log = rewrite(fx.symbolic_trace(model), [compact_dropout.PASS], lambda *a: None)
    assert_expected_inline(
        picture(gm.eval(), log["compact_dropout"], torch.randn(2, 3, 6, 5)),
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains weight, bias  saves input_1[2, 3, 6, 5]
_1 = AlphaDropout(_0)
_2 = FeatureAlphaDropout(_1)
output = output(_2)
# _1: AlphaDropout cannot be packed, it shifts and scales by its input's statistics, and torch keeps the noise;
    use Dropout
# _2: FeatureAlphaDropout cannot be packed, it shifts and scales by its input's statistics, and torch keeps the
    noise; use Dropout""",
    )
    model = Lambda(read_again, c=nn.Conv2d(3, 4, 1), drop=nn.Dropout(0.5, True))
    gm, log = rewrite(fx.symbolic_trace(model), [compact_dropout.PASS], lambda *a: None)
    assert_expected_inline(
        picture(gm.train(), log["compact_dropout"], torch.randn(2, 3, 6, 5)),
        """\
x = x()
c = Conv2d(x)  trains weight, bias  saves x[2, 3, 6, 5]
drop = Dropout(c)  saves float32[2, 4, 6, 5]
add = add(drop, c)
output = output(add)
# drop: add reads what drop writes in place; set inplace=False""",
    )
