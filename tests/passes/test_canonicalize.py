"""One spelling an op: golden graphs, and the same numbers, gradients and aliasing as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from canonical_nets import Net, X, canonical
from expecttest import assert_expected_inline
from graphs import picture
from torch import Tensor, nn

from floorplan.graph.driver import Site


def mixed(s: Any, x: Tensor) -> Any:
    y = torch.add(s.a(x), x)
    y = y.add(x)
    y.add_(x)
    y += s.pad(x)[:, :, :8, :8]
    y = torch.concat([y, F.pad(x, (0, 0))], dim=1)
    return s.none(s.a(y)).flatten(1)


def test_golden_mixed_graph() -> None:
    parts = dict(a=nn.ReLU(), pad=nn.ReflectionPad2d(1), none=nn.Identity())
    text, log, _ = canonical(Net(mixed, **parts))
    assert text == (
        "a = ReLU() <- x\n"
        "add = add <- a, x\n"
        "add_1 = add <- add, x\n"
        "add_ = iadd <- add_1, x\n"
        "pad = pad <- x, pad=(1, 1, 1, 1), mode=reflect, value=None\n"
        "getitem = getitem <- pad, (slice(None, None, None), slice(None, None, None), "
        "slice(None, 8, None), slice(None, 8, None))\n"
        "iadd = iadd <- add_1, getitem\n"
        "pad_1 = pad <- x, pad=(0, 0), mode=constant, value=None\n"
        "concat = cat <- [iadd, pad_1], 1\n"
        "a_1 = ReLU() <- concat\n"
        "flatten = flatten <- a_1, 1, -1"
    )
    assert set(log) == {"add", "add_1", "add_", "pad", "pad_1", "concat", "a_1", "none", "flatten"}
    assert not any(log.values())


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Zero", "Constant", "Replication", "Circular"])
def test_pad_modules(kind: str, d: int) -> None:
    pad = getattr(nn, f"{kind}Pad{d}d")
    model = nn.Sequential(pad(1, 0.5) if kind == "Constant" else pad(1))
    x = X[:1].reshape(1, 4, *{1: (64,), 2: (8, 8), 3: (4, 4, 4)}[d])
    text, log, _ = canonical(model, x)
    assert text.startswith("_0 = pad <- input_1, pad=") and list(log.values()) == [""]


class Drop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(F.dropout(x, 0.3, self.training), 0.2, training=False)
        return F.alpha_dropout(x, 0.4, training=self.training)


def test_dropout_follows_its_own_block() -> None:
    model = nn.Sequential(nn.Dropout(0.0), Drop(), nn.Dropout(0.1))
    text, log, gm = canonical(model)
    assert text == (
        "dropout = Dropout(p=0.3, inplace=False) <- input_1\n"
        "alpha_dropout = AlphaDropout(p=0.4, inplace=False) <- dropout\n"
        "_2 = Dropout(p=0.1, inplace=False) <- alpha_dropout"
    )
    assert log == {"_0": "", "dropout": "", "dropout2d": "", "alpha_dropout": ""}
    gm.train().get_submodule("1").eval()
    drops = {n.partition(".")[0]: m.training for n, m in gm.named_modules() if "Drop" in repr(m)[:9]}
    assert drops["1"] is False and drops["2"] is True


def shaped(s: Any, x: Tensor) -> Any:
    return F.avg_pool2d(x, kernel_size=x.shape[-2:])


def out_argument(s: Any, x: Tensor) -> Any:
    y = x.detach()
    return x + torch.add(y, y, out=y * 1)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda s, x: F.dropout(x), "it drops in eval mode too (training=True)"),
    (lambda s, x: F.dropout(x, training=not s.training), "training is computed while running"),
    (shaped, "kernel_size is computed while running"),
    (lambda s, x: F.conv2d(x, s.c.weight * 2), "its weight is computed in forward"),
    (lambda s, x: torch.add(x, x, alpha=2), "it scales what it adds (alpha)"),
    (lambda s, x: (x * 1).sigmoid_(), "sigmoid_ works in place, and no module does"),
    (lambda s, x: x.clamp(x.mean(), 3), "min is computed while running"),
    (lambda s, x: torch.clamp(x, max=s.c.bias.reshape(1, 4, 1, 1)), "max is computed while running (reshape)"),
    (lambda s, x: torch.clamp(x, s.n.running_var[:, None, None]), "min is computed while running (getitem)"),
    (lambda s, x: (x * 1).clamp_max_(s.low), "max is a tensor, not a number (low)"),
    (lambda s, x: torch.clip(x, torch.tensor(0.1), 2), "min is a tensor, not a number"),
    (lambda s, x: torch.clamp(x, False), "its bounds are not numbers"),
    (lambda s, x: F.batch_norm(x, None, None, training=True), "it has no running statistics"),
    (
        lambda s, x: F.batch_norm(x, s.n.running_mean, s.n.running_var, training=True),
        "it uses the batch's statistics in eval mode too (training=True)",
    ),
    (out_argument, "add has the argument out"),
]


@pytest.mark.parametrize(("fn", "why"), REFUSED)
def test_refusals_name_the_reason(fn: Callable[..., Any], why: str) -> None:
    model = Net(fn, c=nn.Conv2d(4, 4, 1), n=nn.BatchNorm2d(4), low=nn.Parameter(torch.tensor(0.2)))
    _, log, _ = canonical(model)
    assert any(reason.startswith(why) for reason in log.values()), log


def test_pool_indices_and_hooks_are_refused() -> None:
    model = Net(lambda s, x: torch.max_pool2d(x, 2) + F.max_pool2d(x, 2, return_indices=True)[0])
    _, log, _ = canonical(model)
    assert log == {"max_pool2d": ""}
    pad = nn.ZeroPad2d(1)
    pad.register_forward_hook(lambda m, i, o: o * 2)
    _, log, _ = canonical(nn.Sequential(pad))
    assert log == {"_0": "it has forward hooks"}


def test_in_place_readers_still_see_the_change() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.c(x)
        view = y[:, :2]
        F.relu(y, inplace=True)
        z = y + view.sum()
        s.r(z)
        return y, view, z

    text, log, gm = canonical(Net(forward, c=nn.Conv2d(4, 4, 1), r=nn.ReLU6(inplace=True)))
    assert log == {"relu": ""} and "relu = ReLU(inplace=True) <- c\n" in text
    y, view, z = gm(X)
    assert (y >= 0).all() and torch.equal(view, y[:, :2]) and (z <= 6).all()


def test_names_do_not_collide() -> None:
    model = Net(lambda s, x: F.relu(s.relu(x)) + F.relu(s.relu_1(x)) + s.relu(x), relu=nn.ReLU(), relu_1=nn.Sigmoid())
    _, log, gm = canonical(model)
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_module"]
    assert len(set(calls)) == 5 == len(calls) and {"relu", "relu_1"} <= set(calls)
    assert isinstance(gm.get_submodule("relu_1"), nn.Sigmoid) and not any(log.values())


def golden(fn: Callable[..., Any], want: str, **parts: Any) -> None:
    _, log, gm = canonical(Net(fn, **parts))
    assert_expected_inline(picture(gm, [Site(n, why) for n, why in log.items()], X), want, skip=1)


def test_golden() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.relu6(F.conv2d(s.pad(x), s.c.weight, s.c.bias))
        y = F.dropout(y, 0.5, s.training).add(F.dropout(y, training=False))
        y += y.tanh()
        return torch.concat([s.none(y), y], axis=1).flatten(1)  # type: ignore[call-arg]

    golden(
        forward,
        """\
x = x()
pad = pad(x, pad=(1, 1, 1, 1), mode=constant, value=0.0)
conv2d = Conv2d(pad)  trains weight, bias  saves pad[2, 4, 10, 10]
relu6 = ReLU6(conv2d)  saves conv2d[2, 4, 8, 8]
dropout = Dropout(relu6)  saves float32[2, 4, 8, 8]
add = add(dropout, relu6)
tanh = Tanh(add)  saves tanh[2, 4, 8, 8]
iadd = iadd(add, tanh)
concat = cat([iadd, iadd], 1)
flatten = flatten(concat, 1, -1)
output = output(flatten)""",
        pad=nn.ZeroPad2d(1),
        c=nn.Conv2d(4, 4, 3),
        none=nn.Identity(),
    )


def test_golden_refusals() -> None:
    golden(
        lambda s, x: F.dropout(x),
        """\
x = x()
dropout = dropout(x, p=0.5, training=True, inplace=False)
output = output(dropout)
# dropout: it drops in eval mode too (training=True)""",
    )
    golden(
        lambda s, x: F.dropout(x, training=not s.training),
        """\
x = x()
training_flag = TrainingFlag()
not_ = not_(training_flag)
dropout = dropout(x, p=0.5, training=not_, inplace=False)
output = output(dropout)
# dropout: training is computed while running (not_)""",
    )
    golden(
        lambda s, x: F.dropout(x, x.shape[0] / 10, s.training),
        """\
x = x()
getattr_1 = getattr(x, shape)
getitem = getitem(getattr_1, 0)
truediv = truediv(getitem, 10)
training_flag = TrainingFlag()
dropout = dropout(x, p=truediv, training=training_flag, inplace=False)
output = output(dropout)
# dropout: p is computed while running (truediv)""",
    )
    golden(
        lambda s, x: F.avg_pool2d(x, kernel_size=x.shape[-2:]),
        """\
x = x()
getattr_1 = getattr(x, shape)
getitem = getitem(getattr_1, slice(-2, None, None))
avg_pool2d = avg_pool2d(x, kernel_size=getitem)
output = output(avg_pool2d)
# avg_pool2d: kernel_size is computed while running (getitem)""",
    )
    golden(
        lambda s, x: torch.clamp(x, True, 3),
        """\
x = x()
clamp = clamp(x, True, 3)
output = output(clamp)
# clamp: its bounds are not numbers""",
    )
    golden(
        lambda s, x: torch.add(x, x, alpha=2),
        """\
x = x()
add = add(x, x, alpha=2)
output = output(add)
# add: it scales what it adds (alpha)""",
    )
    golden(
        lambda s, x: (x * 1).sigmoid_(),
        """\
x = x()
mul = mul(x, 1)
sigmoid_ = sigmoid_(mul)
output = output(sigmoid_)
# sigmoid_: sigmoid_ works in place, and no module does""",
    )
    golden(
        out_argument,
        """\
x = x()
detach = detach(x)
mul = mul(detach, 1)
add = add(detach, detach, out=mul)
add_1 = add(x, add)
output = output(add_1)
# add: add has the argument out, which is not handled""",
    )
    golden(
        lambda s, x: s.pad(x),
        """\
x = x()
pad = ZeroPad2d(x)
output = output(pad)
# pad: it has forward hooks""",
        pad=hooked(nn.ZeroPad2d(1)),
    )


def hooked(m: nn.Module) -> nn.Module:
    m.register_forward_hook(lambda m, i, o: o * 2)
    return m


def test_golden_refusals_of_functional_layers() -> None:
    c, n = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    golden(
        lambda s, x: F.conv2d(x, s.c.weight * 2),
        """\
x = x()
c_weight = c.weight()
mul = mul(c_weight, 2)
conv2d = conv2d(x, mul)  saves x[2, 4, 8, 8], mul[4, 4, 1, 1]
output = output(conv2d)
# conv2d: its weight is computed in forward""",
        c=c,
    )
    golden(
        lambda s, x: F.conv2d(x, s.c.weight, stride=x.shape[0]),
        """\
x = x()
c_weight = c.weight()
getattr_1 = getattr(x, shape)
getitem = getitem(getattr_1, 0)
conv2d = conv2d(x, c_weight, stride=getitem)  saves x[2, 4, 8, 8]
output = output(conv2d)
# conv2d: stride is computed while running (getitem)""",
        c=c,
    )
    golden(
        lambda s, x: F.batch_norm(x, None, None, training=True),
        """\
x = x()
batch_norm = batch_norm(x, None, None, weight=None, bias=None, training=True, momentum=0.1, eps=1e-05)
output = output(batch_norm)
# batch_norm: it has no running statistics""",
    )
    golden(
        lambda s, x: F.batch_norm(x, s.n.running_mean, s.n.running_var, training=True),
        """\
x = x()
n_running_mean = n.running_mean()
n_running_var = n.running_var()
batch_norm = batch_norm(x, n_running_mean, n_running_var, weight=None, bias=None, training=True, momentum=0.1,
    eps=1e-05)
output = output(batch_norm)
# batch_norm: it uses the batch's statistics in eval mode too (training=True)""",
        n=n,
    )
    golden(
        lambda s, x: F.batch_norm(x, s.n.running_mean, s.n.running_var, s.n.weight),
        """\
x = x()
n_running_mean = n.running_mean()
n_running_var = n.running_var()
n_weight = n.weight()
batch_norm = batch_norm(x, n_running_mean, n_running_var, weight=n_weight, bias=None, training=False,
    momentum=0.1, eps=1e-05)  saves x[2, 4, 8, 8]
output = output(batch_norm)
# batch_norm: it has a weight or a bias, but not both""",
        n=n,
    )
    golden(
        lambda s, x: F.batch_norm(x, s.n.running_mean, s.n.running_var, training=not s.training),
        """\
x = x()
n_running_mean = n.running_mean()
n_running_var = n.running_var()
training_flag = TrainingFlag()
not_ = not_(training_flag)
batch_norm = batch_norm(x, n_running_mean, n_running_var, weight=None, bias=None, training=not_, momentum=0.1,
    eps=1e-05)
output = output(batch_norm)
# batch_norm: training is computed while running""",
        n=n,
    )
