"""The compact-dropout pass: same random numbers, fewer bits, reasons for the rest."""

import torch
from torch import Tensor, fx, nn

from floorplan.graph.driver import Pass, rewrite
from floorplan.layers.activations import PackedDropout
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
