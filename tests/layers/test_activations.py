"""Compact layers against plain autograd: values, gradients, bytes kept, fakes."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from saves import formats, kept, kept_bytes, same
from steps import check as step_check
from steps import graph_of
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from floorplan.api import check, rewrite
from floorplan.layers.activations import (
    ACTIVATIONS,
    Activation,
    PackedActivation,
    act_config,
    act_of,
    gate_of,
    options_of,
)
from floorplan.layers.dropout import PackedDropout
from floorplan.layers.plain import Clamp
from floorplan.layers.pools import PackedMaxPool, ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.ledger.pillars import pillar_of
from floorplan.ledger.recorder import Saved
from floorplan.methods.plain import plain_form
from floorplan.methods.verify import set_plain
from floorplan.step.compile import Schedule, compile_step


def frozen_prelu(channels: int) -> nn.PReLU:
    m = nn.PReLU(channels).requires_grad_(False)
    m.weight.copy_(torch.linspace(-0.3, 0.9, channels))
    return m


ACTS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.Hardtanh(-0.5, 2.0),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(-0.2),
    nn.Threshold(0.5, 9.0),
    nn.Hardsigmoid(),
    nn.Hardshrink(),
    nn.Softshrink(0.7),
    nn.RReLU().eval(),
    frozen_prelu(5),
    frozen_prelu(1),
    Clamp(0, 6),
    Clamp(0.1, 0.7),
    Clamp(0.5),
    Clamp(None, 6.0),
    Clamp(3.0, -3.0),
    Clamp(2.0, 2.0),
]
SMOOTH = [
    nn.SiLU(),
    nn.Hardswish(),
    nn.GELU("tanh"),
    nn.Mish(),
    nn.ELU(0.5),
    nn.CELU(0.5),
    nn.SELU(),
    nn.Sigmoid(),
    nn.LogSigmoid(),
    nn.Tanh(),
    nn.Softplus(2.0, 5.0),
    nn.Softsign(),
    nn.Tanhshrink(),
    nn.GLU(1),
    nn.Softmax(1),
    nn.Softmax2d(),
    nn.LogSoftmax(1),
]
EDGES = [0.0, -0.0, 6.0, -0.5, 0.5, 2.0, 3.0, -3.0, 0.7, -0.7, -1e-30, 5.999]


@pytest.mark.parametrize("act", ACTS, ids=lambda m: str(m))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_activation_equals_autograd(act: nn.Module, dtype: torch.dtype) -> None:
    act = act.to(dtype)
    packed = PackedActivation.of(act)
    for x in formats((torch.randn(3, 5, 7, 3, dtype=torch.float64) * 4).to(dtype)):
        same(act, packed, x)
        n = x.numel()
        assert kept_bytes(packed, x.clone().requires_grad_()) == (n + 7) // 8
    edges = torch.tensor(EDGES, dtype=dtype)
    same(act, packed, edges[None, None].expand(2, 5, -1) if isinstance(act, nn.PReLU) else edges)


def each(*wanted: bool) -> pytest.MarkDecorator:
    """One test a record; `wanted`: those with a gate, without one, or both."""
    found = [a for a in ACTIVATIONS.values() if (a.gate is not None) in wanted]
    return pytest.mark.parametrize("a", found, ids=lambda a: a.name)


def examples(a: Activation) -> list[nn.Module]:
    found = [deepcopy(m).float() for m in [*ACTS, *SMOOTH] if type(m) is a.kind]
    assert found, f"{a.name}: no example; add one"
    return found


@each(True, False)
def test_a_record_rebuilds_its_modules(a: Activation) -> None:
    for m in examples(a):
        twin = a.kind(**json.loads(json.dumps(options_of(m)))).train(m.training)
        assert repr(twin) == repr(m) and hasattr(m, "inplace") == a.inplace
        if a.ends_sites:
            again = act_of(json.loads(json.dumps(act_config(m))), inplace=False)
            assert repr(again) == repr(m)
        else:
            with pytest.raises(ValueError, match=f"{a.name} ends no site"):
                act_of(act_config(m))


@each(True, False)
def test_a_record_names_the_kernels_that_run(a: Activation) -> None:
    for m in examples(a):
        x = torch.randn(2, 5 if a.kind is nn.PReLU else 4, 3, 3)
        with Kernels() as seen, torch.no_grad():
            m(x)
        assert not a.kernels or set(seen.names) <= set(a.kernels.split()), seen.names


class Kernels(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@each(True, False)
def test_what_an_activation_keeps_is_of_its_pillar(a: Activation) -> None:
    functions = a.functions.split()
    for op in (a.name, *functions, *(f"{f}_" for f in functions)):
        saved = Saved("n", op, "", (), torch.float32, 0, "kept", op, 4, 4)
        assert pillar_of(saved, None, False) == "activation", op


@each(True)
def test_the_gate_is_the_derivative_at_its_bounds_and_beside_them(a: Activation) -> None:
    for m in examples(a):
        gate = gate_of(m)
        if isinstance(gate, str):  # PReLU's, which has a slope a channel
            continue
        bounds = torch.tensor([b for b in (gate.lo, gate.hi) if math.isfinite(b)], dtype=torch.float64)
        away = torch.tensor(math.inf, dtype=torch.float64)
        x = torch.cat([bounds, bounds.nextafter(away), bounds.nextafter(-away), torch.tensor(EDGES).double()])
        (want,) = torch.autograd.grad(m(x.requires_grad_()).sum(), x)
        inside = (gate.lo <= x) & (x <= gate.hi) if gate.closed else (gate.lo < x) & (x < gate.hi)
        assert want.tolist() == [gate.inside if i else gate.outside for i in inside]
        same(m, PackedActivation.of(m), x.detach())


class Acting(nn.Module):
    """An activation behind a conv, on a sum, and on the caller's input."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3)
        self.act, self.on_sum = act, deepcopy(act)

    def forward(self, x: Tensor) -> Tensor:
        y = self.on_sum(self.act(self.a(x)) + self.b(x))
        return self.c(y).mean((2, 3))


def channels(act: nn.Module) -> nn.Module:
    return frozen_prelu(6) if isinstance(act, nn.PReLU) else act


def adapted(act: nn.Module, x: Tensor) -> fx.GraphModule:
    return graph_of(Acting(frozen_prelu(6) if isinstance(act, nn.PReLU) else act).to(x.dtype).eval(), x, rank=1).eval()


@each(True)
def test_a_gate_brings_a_net_to_the_floor(a: Activation) -> None:
    for m in examples(a):
        found = check(adapted(m, x := torch.randn(2, 3, 6, 6)), x, mode="eval", measured=False)
        assert found.verdict == "AT_FLOOR", m


class Called(nn.Module):
    """An activation as a function, which a module has to take the place of."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.clamp(x, 0, 6),
        lambda x: x.clamp_(0, 6),
        lambda x: torch.clip(x, max=0.5),
        lambda x: x.clip_(0.1),
        lambda x: torch.clamp_min_(x, 0),
        lambda x: x.clamp_max(0.5),
        lambda x: F.hardshrink(x, 0.3),
        lambda x: F.softshrink(x),
        lambda x: torch.threshold(x, 0.1, -1.0),
    ],
)
def test_a_net_of_functions_reaches_the_floor(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 6, 6)
    net = Acting(Called(f)).eval()
    assert check(net, x, measured=False).verdict == "ABOVE_FLOOR"
    done = rewrite(net, x, measured=False)
    assert done.report.after.verdict == "AT_FLOOR"
    step_check(graph_of(net.double(), x.double()).eval(), (x.double(),), Schedule())


@each(True, False)
def test_a_compiled_step_has_the_gradients_of_autograd_at_kinks_too(a: Activation) -> None:
    if a.kind is nn.GLU:
        return
    for m in examples(a):
        x = torch.tensor([*EDGES, *EDGES[::-1], *(-v for v in EDGES)], dtype=torch.float64).reshape(1, 3, 4, 3)
        gm = adapted(m, x)
        with torch.no_grad():  # `a` and the sum hand on what they get: the activations meet their kinks
            for site in (gm.a, gm.b):
                for t in (site.weight, site.bias, site.U):
                    t.zero_()
            gm.a.weight.copy_(torch.eye(3).repeat(2, 1)[..., None, None])
            gm.c.U.normal_()
        target = torch.randn(1, 5, dtype=torch.float64)
        compile_step(gm, "mse", x)(x, target)
        got = {n: p.grad for n, p in gm.named_parameters() if p.grad is not None}
        gm.zero_grad()
        set_plain(gm, True)
        for path, layer in list(gm.named_modules()):
            if isinstance(layer, PackedActivation):
                gm.set_submodule(path, plain_form(layer))
        nn.functional.mse_loss(gm(x), target).backward()
        assert set(got) == {"a.U", "b.U", "c.U"}
        for n, g in got.items():
            want = gm.get_parameter(n).grad
            assert (g - want).abs().max() <= 1e-12 * max(1.0, float(want.abs().max())), (n, m)


def test_activation_in_place_flag_is_not_kept() -> None:
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    y = PackedActivation.of(nn.ReLU(inplace=True))(x * 1)
    assert y.tolist() == [0.0, 1.0] and x.tolist() == [-1.0, 1.0]


def test_no_gradient_no_bits() -> None:
    y = PackedActivation.of(nn.ReLU())(torch.randn(4))
    assert y.grad_fn is None


@pytest.mark.parametrize(
    "act,word",
    [
        (nn.SiLU(), "recompute"),
        (nn.Hardswish(), "lossy"),
        (nn.GELU(), "lossy"),
        (nn.Mish(), "ReLU6"),
        (nn.ELU(), "LeakyReLU"),
        (nn.Sigmoid(), "Hardsigmoid"),
        (nn.Tanh(), "Hardtanh"),
        (nn.Softplus(), "recompute"),
        (nn.RReLU(), "eval mode"),
        (nn.PReLU(), "freeze"),
        (nn.Linear(1, 1), "not known"),
        (nn.Identity(), "not known"),
    ],
)
def test_refusals_name_a_way_out(act: nn.Module, word: str) -> None:
    why = gate_of(act)
    assert isinstance(why, str) and word in why and "; " in why and "\n" not in why
    assert type(act).__name__ in why and PackedActivation.of(act) == why


FAKES: list[nn.Module] = [
    PackedActivation("ReLU6"),
    PackedActivation("PReLU", {"num_parameters": 5}),
    PackedMaxPool([3, 3], [2, 2], [1, 1], [1, 1]),
    PackedMaxPool([2, 2], [2, 2], [0, 0], [1, 1], True),
    ShapeAvgPool([3, 3], [2, 2], [1, 1]),
    ShapeAdaptiveAvgPool([3, 3]),
    ShapeAdaptiveAvgPool([1, 1]),
    PackedDropout("Dropout", 0.3),
    PackedDropout("Dropout2d", 0.3),
]


@pytest.mark.parametrize("module", FAKES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("last", [False, True])
def test_symbolic_run(module: nn.Module, device: str, last: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    real = torch.empty(7, 5, 11, 13, device=device)
    real = real.to(memory_format=torch.channels_last) if last else real
    slope = isinstance(module, PackedActivation) and module.slope is not None
    sizes = [DimDynamic.STATIC if slope and i == 1 else DimDynamic.DYNAMIC for i in range(4)]
    x = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    copy = deepcopy(module).to(device)
    with mode:
        y, saved = kept(copy, x.requires_grad_())
        (gx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert gx.shape == x.shape
    assert all(not isinstance(n, int) for i, n in enumerate(gx.shape) if sizes[i] != DimDynamic.STATIC)
    real = torch.randn(7, 5, 11, 13).to(memory_format=torch.channels_last if last else torch.preserve_format)
    want, real_saved = kept(module, real.requires_grad_())
    assert sum(int(t.numel()) * t.element_size() for t in saved if t.dtype == torch.uint8) == sum(
        t.nbytes for t in real_saved
    )
    assert tuple(int(n) for n in y.shape) == tuple(want.shape)
    assert tuple(int(n) for n in y.stride()) == want.stride()
