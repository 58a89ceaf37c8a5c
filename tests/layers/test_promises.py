"""Promises: the same bits, computed once, let go at the last use; refusals; what outer hooks see."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.layers.promises import Forgetful, Keep, Promise, Promised
from floorplan.torch_doors import storage_key


def chain(conv: nn.Module, x: Tensor) -> Tensor:
    """silu(conv(x)) that keeps x in the place of conv(x)."""
    z = conv(x)
    promise = Promise("module", "")((conv, Keep()(x)), {})
    y: Tensor = Forgetful("function", "torch.nn.functional.silu")((z,), {}, (z,), (promise,))
    return y


def conv_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Conv2d(3, 8, 3).double().requires_grad_(False), torch.randn(2, 3, 6, 6, dtype=torch.float64)


def test_gradients_are_the_same_bits_and_the_graph_can_be_walked_twice() -> None:
    conv, x = conv_and_input()
    a, b = (x.clone().requires_grad_() for _ in range(2))
    want = torch.autograd.grad(F.silu(conv(a)).square().sum(), a)[0]
    loss = chain(conv, b).square().sum()
    for retain in (True, False):
        assert torch.equal(torch.autograd.grad(loss, b, retain_graph=retain)[0], want)


def test_the_result_is_not_kept_and_the_input_is_let_go() -> None:
    conv, x = conv_and_input()
    seen: list[weakref.ref[Tensor]] = []
    conv.register_forward_hook(lambda m, args, out: seen.append(weakref.ref(out.untyped_storage())))
    y = chain(conv, x.requires_grad_() * 1)
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None
    y.sum().backward()
    gc.collect()
    assert len(seen) == 2 and seen[1]() is None


def test_a_saved_result_is_promised_too() -> None:
    sigmoid, x = Forgetful("function", "torch.sigmoid"), torch.randn(5).requires_grad_()
    promise = Promise("function", "torch.sigmoid")((Keep()(x),), {})
    y = sigmoid((x,), {}, (), (), promise)
    g = torch.autograd.grad(y.sum(), x)[0]
    other = x.detach().clone().requires_grad_()
    assert torch.equal(g, torch.autograd.grad(torch.sigmoid(other).sum(), other)[0])


def test_a_promise_is_computed_once_and_lets_go_of_its_inputs() -> None:
    calls: list[Tensor] = []
    x = torch.ones(3)

    def add_one(t: Tensor) -> Tensor:
        calls.append(t)
        return t + 1

    p = Promised(add_one, (Keep()(x),), {})
    q = Promised(torch.mul, (p, 2), {})
    assert torch.equal(q.value(), torch.full((3,), 4.0)) and torch.equal(p.value(), torch.full((3,), 2.0))
    assert len(calls) == 1 and p._call is None and q._call is None


def test_views_of_promised_memory() -> None:
    x = torch.randn(4, 6).requires_grad_()
    z = x * 2
    promise = Promise("function", "operator.mul")((Keep()(x), 2), {})
    y = Forgetful("method", "matmul")((z, z.t()), {}, (z,), (promise,))
    other = x.detach().clone().requires_grad_()
    want = torch.autograd.grad((other * 2).matmul((other * 2).t()).sin().sum(), other)[0]
    assert torch.allclose(torch.autograd.grad(y.sin().sum(), x)[0], want, rtol=0, atol=1e-5)


def test_writing_to_what_is_kept_is_an_error() -> None:
    conv, x = conv_and_input()
    x = x.requires_grad_() * 1
    y = chain(conv, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_outer_hooks_see_what_is_kept_and_nothing_else() -> None:
    conv, x = conv_and_input()
    x = x.requires_grad_() * 1
    seen: list[int] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(storage_key(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = chain(conv, x)
    own = {storage_key(p) for p in conv.parameters()}
    kept = [k for k in seen if k not in own]
    assert set(kept) == {storage_key(x)}
    y.sum().backward()


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3).requires_grad_(False)
    a, b = (torch.ones(2, 3, 6, 6).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        y, want = chain(conv, a), F.silu(conv(b))
    assert torch.equal(y, want) and y.dtype == torch.bfloat16
    g, w = torch.autograd.grad(y.sum(), a)[0], torch.autograd.grad(want.sum(), b)[0]
    assert torch.equal(g, w)


def test_nothing_is_promised_without_gradients() -> None:
    conv, x = conv_and_input()
    with torch.no_grad():
        assert Keep()(x) is None and Promise("module", "")((conv, None), {}) is None
        assert torch.equal(chain(conv, x), F.silu(conv(x)))


@pytest.mark.parametrize(
    "kind,target", [("function", "os.system"), ("method", "__reduce__"), ("code", ""), ("method", "register_hook")]
)
def test_files_cannot_name_other_calls(kind: str, target: str) -> None:
    for cls in (Promise, Forgetful):
        with pytest.raises((ValueError, FloorplanError)):
            cls(kind, target)


def test_files_cannot_read_other_attributes() -> None:
    with pytest.raises(FloorplanError, match="refused"):
        Forgetful("function", "builtins.getattr").call(torch.ones(2), "__class__")
    assert Forgetful("function", "builtins.getattr").call(torch.ones(2, 3), "shape") == (2, 3)
