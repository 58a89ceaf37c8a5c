"""The pack-gates pass: what it replaces, what it refuses, what is kept afterwards."""

import math
from copy import deepcopy

import pytest
import torch
from graphs import golden
from torch import Tensor, fx, nn

from floorplan.graph.driver import Pass, rewrite
from floorplan.layers.activations import ACTIVATIONS, Gate, PackedActivation, gate_of
from floorplan.passes import pack_gates


def agree(_: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    outputs = []
    for gm in (before, after):
        z = x.clone().requires_grad_()
        y = deepcopy(gm).double()(z)
        outputs += [(y, torch.autograd.grad(y.square().sum(), z)[0])]
    (a, ga), (b, gb) = outputs
    assert torch.equal(a, b) and torch.equal(ga, gb)


def run(model: nn.Module) -> tuple[fx.GraphModule, dict[str, str]]:
    gm, log = rewrite(fx.symbolic_trace(model), [pack_gates.PASS], agree)
    return gm, {s.node: s.refused for s in log["pack_gates"]}


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    seen: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).sum()
    return sum(seen.values())


class Twice(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x))))  # type: ignore[no-any-return]


class ReadsOverwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return self.act(z) + z  # type: ignore[no-any-return]


def test_every_gateable_activation_is_replaced() -> None:
    acts = [nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Hardsigmoid(), nn.PReLU(4)]
    acts[4].requires_grad_(False)
    gm, log = run(nn.Sequential(nn.Conv2d(3, 4, 1), *acts))
    assert set(log.values()) == {""} and len(log) == 5
    modules = dict(gm.named_modules())
    assert all(isinstance(modules[str(i)], PackedActivation) for i in range(1, 6))


@pytest.mark.parametrize(
    "act,reason", [(nn.SiLU(), "lossy"), (nn.GELU(), "recompute"), (nn.PReLU(), "freeze"), (nn.Tanh(), "Hardtanh")]
)
def test_others_are_refused_with_a_way_out(act: nn.Module, reason: str) -> None:
    gm, log = run(nn.Sequential(nn.Conv2d(3, 4, 1), act, nn.ReLU()))
    assert reason in log["_1"] and log["_2"] == ""
    assert type(gm.get_submodule("1")) is type(act)


def test_a_module_called_twice_is_replaced_once() -> None:
    gm, log = run(Twice(nn.ReLU()))
    assert log == {"act": "", "act_1": ""}
    assert sum(isinstance(m, PackedActivation) for m in gm.modules()) == 1


def test_overwritten_input_that_is_read_again_is_refused() -> None:
    gm, log = run(ReadsOverwritten())
    assert log == {"act": "add reads what act writes in place; set inplace=False"}
    assert type(gm.act) is nn.ReLU


def test_other_modules_are_not_looked_at() -> None:
    _, log = run(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()))
    assert log == {}


def test_bytes_kept() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Hardtanh(-1.0, 0.5))
    x = torch.randn(3, 5, 9, 9, requires_grad=True)
    gm, _ = run(model)
    assert kept_bytes(gm, x) == 2 * ((3 * 5 * 81 + 7) // 8)
    assert kept_bytes(model, x) == 4 * 3 * 5 * 81  # Hardtanh keeps what ReLU keeps


def test_gate_table() -> None:
    frozen = nn.PReLU(3).requires_grad_(False)
    assert gate_of(nn.ReLU()) == Gate(0.0, math.inf, False, 1.0, 0.0)
    assert gate_of(nn.ReLU6()) == Gate(0.0, 6.0, False, 1.0, 0.0)
    assert gate_of(nn.Softshrink(0.5)) == Gate(-0.5, 0.5, True, 0.0, 1.0)
    assert isinstance(gate_of(frozen), str) and isinstance(PackedActivation.of(frozen), PackedActivation)


def test_subclass_is_not_taken_for_its_parent() -> None:
    class Odd(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    assert isinstance(gate_of(Odd()), str)


def test_golden() -> None:
    slope = nn.PReLU(4).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Hardtanh(), slope)
    golden(
        [pack_gates.PASS],
        model,
        torch.randn(2, 3, 6, 5),
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains weight, bias  saves input_1[2, 3, 6, 5]
_1 = PackedActivation[ReLU](_0)  saves uint8[30]
_2 = PackedActivation[Hardtanh](_1)  saves uint8[30]
_3 = PackedActivation(_2)  saves uint8[30]
output = output(_3)""",
    )


def test_golden_refusals() -> None:
    x, softmax = torch.randn(2, 4, 6, 4), (nn.Softmax, nn.LogSoftmax)
    ungated = [a.kind for a in ACTIVATIONS.values() if a.gate is None]
    acts = [*(kind(1) if kind in softmax else kind() for kind in ungated), nn.PReLU()]
    golden(
        [pack_gates.PASS],
        nn.Sequential(*acts),
        x,
        """\
input_1 = input()
_0 = SiLU(input_1)
_1 = Hardswish(_0)
_2 = GELU(_1)
_3 = Mish(_2)
_4 = ELU(_3)
_5 = CELU(_4)
_6 = SELU(_5)
_7 = Tanh(_6)
_8 = Sigmoid(_7)
_9 = LogSigmoid(_8)
_10 = Softplus(_9)
_11 = Softsign(_10)
_12 = Tanhshrink(_11)
_13 = GLU(_12)
_14 = Softmax(_13)
_15 = Softmax2d(_14)
_16 = LogSoftmax(_15)
_17 = PReLU(_16)  trains weight  saves _16[2, 4, 6, 2]
output = output(_17)
# _0: SiLU cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a few-bit
    derivative (lossy), or train with ReLU6
# _1: Hardswish cannot be gated, its derivative is a line between -3 and 3; recompute it exactly, keep a few-bit
    derivative (lossy), or train with ReLU6
# _2: GELU cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a few-bit
    derivative (lossy), or train with ReLU
# _3: Mish cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a few-bit
    derivative (lossy), or train with ReLU6
# _4: ELU cannot be gated, its derivative is a curve below 0; recompute it exactly, keep a few-bit derivative
    (lossy), or train with LeakyReLU
# _5: CELU cannot be gated, its derivative is a curve below 0; recompute it exactly, keep a few-bit derivative
    (lossy), or train with LeakyReLU
# _6: SELU cannot be gated, its derivative is a curve below 0; recompute it exactly, keep a few-bit derivative
    (lossy), or train with LeakyReLU
# _7: Tanh cannot be gated, its derivative is a curve of its output; recompute it exactly, keep a few-bit
    derivative (lossy), or train with Hardtanh
# _8: Sigmoid cannot be gated, its derivative is a curve of its output; recompute it exactly, keep a few-bit
    derivative (lossy), or train with Hardsigmoid
# _9: LogSigmoid cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a
    few-bit derivative (lossy), or train with Hardsigmoid
# _10: Softplus cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a few-bit
    derivative (lossy), or train with ReLU
# _11: Softsign cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a few-bit
    derivative (lossy), or train with Hardtanh
# _12: Tanhshrink cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a
    few-bit derivative (lossy), or train with Softshrink
# _13: GLU cannot be gated, it is a product and needs both factors; recompute it exactly, keep a few-bit
    derivative (lossy), or train with ReLU
# _14: Softmax cannot be gated, its derivative is a curve of its output; recompute it exactly, keep a few-bit
    derivative (lossy), or train with no softmax inside the network
# _15: Softmax2d cannot be gated, its derivative is a curve of its output; recompute it exactly, keep a few-bit
    derivative (lossy), or train with no softmax inside the network
# _16: LogSoftmax cannot be gated, its derivative is a curve of its output; recompute it exactly, keep a few-bit
    derivative (lossy), or train with a loss that takes logits
# _17: PReLU with a trainable slope needs its input for the gradient; freeze the slope""",
    )
    golden(
        [pack_gates.PASS],
        ReadsOverwritten(),
        x[:, :3],
        """\
x = x()
conv = Conv2d(x)  trains weight, bias  saves x[2, 3, 6, 4]
act = ReLU(conv)  saves conv[2, 4, 6, 4]
add = add(act, conv)
output = output(add)
# act: add reads what act writes in place; set inplace=False""",
    )
