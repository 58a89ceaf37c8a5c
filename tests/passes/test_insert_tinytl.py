"""insert_tinytl: which submodules get a lite residual, what becomes of the rest, and the paper's figures."""

import copy
from pathlib import Path
from typing import Any

import backbones
import pytest
import torch
from graphs import golden, randomize, run_passes, show
from hard_nets import Lambda
from torch import Tensor, fx, nn

import floorplan
from floorplan.errors import FloorplanError
from floorplan.graph import driver
from floorplan.graph.driver import Site
from floorplan.graph.trace import trace
from floorplan.layers.lite import FrozenConv, LiteResidual, TinySite
from floorplan.ledger.losses import cross_entropy
from floorplan.ledger.run import Step
from floorplan.ledger.step_figures import step_figures
from floorplan.methods.catalogue import METHODS, Options
from floorplan.methods.verify import Verifier
from floorplan.passes import canonicalize
from floorplan.passes.insert_tinytl import tinytl

X = torch.randn(2, 8, 6, 5)


class Block(nn.Module):
    """conv-BN-ReLU-conv-BN, plus its input."""

    def __init__(self, i: int = 8, o: int = 8, inplace: bool = True) -> None:
        super().__init__()
        self.a, self.n, self.act = nn.Conv2d(i, 12, 1), nn.BatchNorm2d(12), nn.ReLU(inplace)
        self.b, self.m = nn.Conv2d(12, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.m(self.b(self.act(self.n(self.a(x)))))
        return y


class Net(nn.Module):
    """A stem, a wrapped block, one with its residual outside, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU6(True))
        self.one, self.two = nn.Sequential(Block()), Block()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.stem(x))
        x = torch.relu_(self.two(x) + x)
        y: Tensor = self.head(self.pool(x).flatten(1))
        return y


def insert(model: nn.Module, train_bn: bool = False, x: Tensor = X) -> tuple[fx.GraphModule, list[Site]]:
    return run_passes(randomize(model), [canonicalize.PASS, tinytl(train_bn)], x)


HEAD = """\
pool = AdaptiveAvgPool2d({})
flatten = flatten(pool, 1, -1)
head = Linear(flatten)
output = output(head)"""


def test_tinytl() -> None:
    gm, log = insert(Net())
    assert (
        show(gm, log)
        == """\
x = x()
stem_0 = TinySite[ReLU6](x)
one_0_a = TinySite[ReLU](stem_0)
one_0_b = TinySite(one_0_a)
one_lite = LiteResidual(stem_0, one_0_b)
add_1 = add(one_0_b, one_lite)
two_a = TinySite[ReLU](add_1)
two_b = TinySite(two_a)
two_lite = LiteResidual(add_1, two_b)
add_2 = add(two_b, two_lite)
add = add(add_2, add_1)
relu_ = ReLU(add)
"""
        + HEAD.format("relu_")
    )
    trained = {n.rpartition(".")[2] for n, p in gm.named_parameters() if p.requires_grad}
    assert trained == {"wide", "weight", "bias", "point", "U", "B", "beta"}
    assert not any(p.requires_grad for n, p in gm.named_parameters() if n.startswith("head"))
    acts = [type(m.act).__name__ for m in gm.modules() if isinstance(m, TinySite)]
    assert acts == ["ReLU6", "ReLU", "NoneType", "ReLU", "NoneType"]


def test_tinytl_trainbn() -> None:
    gm, log = insert(Net(), train_bn=True)
    assert (
        show(gm, log)
        == """\
x = x()
stem_0 = FrozenConv(x)
stem_1 = BatchNorm2d(stem_0)
stem_2 = ReLU6(stem_1)
one_0_a = FrozenConv(stem_2)
one_0_n = BatchNorm2d(one_0_a)
one_0_act = ReLU(one_0_n)
one_0_b = FrozenConv(one_0_act)
one_0_m = BatchNorm2d(one_0_b)
one_lite = LiteResidual(stem_2, one_0_m)
add_1 = add(one_0_m, one_lite)
two_a = FrozenConv(add_1)
two_n = BatchNorm2d(two_a)
two_act = ReLU(two_n)
two_b = FrozenConv(two_act)
two_m = BatchNorm2d(two_b)
two_lite = LiteResidual(add_1, two_m)
add_2 = add(two_m, two_lite)
add = add(add_2, add_1)
relu_ = ReLU(add)
"""
        + HEAD.format("relu_")
    )
    for path, m in gm.named_modules():
        for name, p in m.named_parameters(recurse=False):
            frozen = isinstance(m, nn.Linear) or isinstance(m, nn.BatchNorm2d) and name == "weight"
            assert p.requires_grad == (not frozen), f"{path}.{name}"


@pytest.mark.parametrize("train_bn", [False, True])
def test_gradients_are_plain_autograds(train_bn: bool) -> None:
    """In train mode: against the same lite residuals written into the source model's own blocks."""
    torch.manual_seed(0)
    model = randomize(Net()).double()
    gm, _ = driver.rewrite(trace(model, (X.double(),)).gm, [canonicalize.PASS, tinytl(train_bn)], lambda *a: None)
    source: Any = copy.deepcopy(model)
    lites: list[LiteResidual] = [m for m in gm.modules() if isinstance(m, LiteResidual)]
    for lite in lites:
        nn.init.normal_(lite.U)
    plain = copy.deepcopy(lites)

    def reference(x: Tensor) -> Tensor:
        s = source.stem(x)
        y = source.one(s)
        y = y + plain[0](s, y)
        z = source.two(y)
        y = torch.relu(z + plain[1](y, z) + y)
        return source.head(source.pool(y).flatten(1))  # type: ignore[no-any-return]

    for m in (gm.train(), source.train()):
        for bn in m.modules() if not train_bn else ():
            if isinstance(bn, nn.BatchNorm2d):
                bn.eval()
    x = X.double()
    got, want = gm(x), reference(x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    g = torch.randn_like(want)
    torch.autograd.backward([got, want], [g, g])
    pairs = [
        (a.grad, b.grad)
        for m, n in zip(lites, plain, strict=True)
        for a, b in zip(m.parameters(), n.parameters(), strict=True)
    ]
    theirs: dict[str, Any] = dict(source.named_modules())
    for path, m in gm.named_modules():
        if isinstance(m, FrozenConv | TinySite) and m.bias is not None:
            pairs.append((m.bias.grad, theirs[path].bias.grad))
        if isinstance(m, nn.BatchNorm2d):
            pairs.append((m.bias.grad, theirs[path].bias.grad))
    bns = [m for m in source.modules() if isinstance(m, nn.BatchNorm2d)]
    sites = [m for m in gm.modules() if isinstance(m, TinySite)]
    pairs += [(s.beta.grad, n.bias.grad) for s, n in zip(sites, bns, strict=False)]
    assert len(pairs) == 12 + 5 + 3  # lite residuals, BatchNorms, convs with a bias
    largest = max(float(b.abs().max()) for _, b in pairs if b is not None)
    for a, b in pairs:
        assert a is not None and b is not None
        assert float((a - b).abs().max()) <= 1e-10 * largest


@pytest.mark.parametrize("method,peak", [("tinytl", 150.4713), ("tinytl-trainbn", 518.8377)])
def test_the_papers_figures(method: str, peak: float) -> None:
    line = METHODS[method].passes(Options())
    traced = trace(backbones.mobilenet_v2(), (torch.empty(2, 1, 97, 60),), both_modes=True)
    gm, log = driver.rewrite(traced.gm, line, lambda *a: None)
    gm.train()
    target = torch.zeros(64, dtype=torch.int64)
    figures = step_figures(Step(gm, (torch.empty(64, 1, 97, 60),), target, cross_entropy))
    assert round(figures.training_state_peak_refcount / 1e6, 4) == peak
    assert sum(isinstance(m, LiteResidual) for m in gm.modules()) == 17
    assert not any(s.refused for sites in log.values() for s in sites)


class Around(nn.Module):
    """Two good blocks around what is to be refused."""

    def __init__(self, odd: nn.Module, calls: Any) -> None:
        super().__init__()
        self.first, self.odd, self.calls = Block(), odd, calls

    def forward(self, x: Tensor) -> Any:
        return self.calls(self.odd, self.first(x))


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        conv: Any = nn.Conv1d if kind == "1-D" else nn.Conv2d
        self.a, self.b = conv(4 if kind == "split" else 8, 8, 1), conv(8, 8, 1)
        self.kind = kind

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        if self.kind == "writer":
            x.relu_()
        x = x.flatten(2) if self.kind == "1-D" else x.chunk(2, 1)[0] if self.kind == "split" else x
        p = self.a(x)
        q = self.b(p)
        if z is not None:
            q = q + z
        if self.kind == "shuffle":
            q = torch.channel_shuffle(q, 2)
        return (p, q) if self.kind == "outputs" else q


def plain(m: nn.Module, x: Tensor) -> Any:
    return m(x)


@pytest.mark.parametrize(
    "kind,calls,reason",
    [
        ("1-D", plain, "odd.a is a Conv1d: TinyTL's lite residual is defined for 2-D convs"),
        ("inputs", lambda m, x: m(x, x * 2), "it reads 2 values from outside (add, mul), not one"),
        ("outputs", plain, "2 of its values are used outside (odd_a, odd_b), not one"),
        ("writer", plain, "relu_ writes in place into add, which the lite residual would read later"),
        ("shuffle", plain, "how many channels channel_shuffle has cannot be told from the layers around it"),
    ],
)
def test_refused(kind: str, calls: Any, reason: str) -> None:
    gm, log = insert(Around(Odd(kind), calls))
    got = [s.refused.replace("add_1", "add") for s in log if s.node == "odd" and s.refused]
    assert got == [reason]
    assert sum(isinstance(m, LiteResidual) for m in gm.modules()) == 1


@pytest.mark.parametrize("left", [True, False])
def test_a_residual_added_in_place(left: bool) -> None:
    """A ResNet's `y += x; relu_(y)` leaves x alone; `x += y` does not."""

    class Residual(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if left:
                y += x
                return torch.relu_(y)
            x += y
            return torch.relu_(x)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.two = nn.Conv2d(8, 8, 1), Residual(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(self.stem(x)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = randomize(Two()).double().eval()
    x = X.double()
    check: Any = Verifier((x,)) if left else lambda *a: None  # the other cannot be trained as it is
    gm, log = driver.rewrite(trace(model, (x,)).gm, [canonicalize.PASS, tinytl()], check)
    refused = [s.refused for s in log["insert_tinytl"] if s.refused]
    text = "iadd writes in place into stem, which the lite residual would read later"
    assert refused == ([] if left else [text])
    assert sum(isinstance(m, LiteResidual) for m in gm.modules()) == 1 + left


def test_a_block_that_splits_its_input_has_the_inputs_width() -> None:
    gm, _ = insert(Around(Odd("split"), plain))
    lites = [m.config() for m in gm.modules() if isinstance(m, LiteResidual)]
    assert lites == [{"inputs": 8, "outputs": 8}] * 2


def test_no_block_is_an_error() -> None:
    with pytest.raises(FloorplanError, match="^tinytl: no lite residual fits; it stands beside sub"):
        insert(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)))


def test_a_block_that_runs_twice_has_one_branch() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))  # type: ignore[no-any-return]

    gm, _ = insert(Twice())
    calls = [n.target for n in gm.graph.nodes if "lite" in str(n.target)]
    assert calls == ["block.lite", "block.lite"]
    betas = [n for n, p in gm.named_parameters() if n.endswith("beta")]
    assert betas == ["block.n.beta", "block.m.beta"]  # one BatchNorm, one bias, whatever its calls


def test_an_activation_behind_the_block_waits_for_the_add() -> None:
    gm, log = insert(nn.Sequential(Block(inplace=False), nn.ReLU(True), Block(8, 6)))
    text = show(gm, log)
    assert "add = add(_0_b, _0_lite)\n_1 = ReLU(add)\n_2_a = TinySite[ReLU](_1)" in text


def test_what_is_not_fixed_stays_and_trains_its_bias() -> None:
    model = Net()
    model.two.n = nn.BatchNorm2d(12, track_running_stats=False)
    model.two.m = nn.BatchNorm2d(8, affine=False)
    gm, log = insert(model)
    why = "no running statistics: it normalises by the batch in eval mode too; its bias trains as it is"
    assert [s.refused for s in log if s.refused] == [why]
    assert isinstance(gm.get_submodule("two.a"), FrozenConv)
    trains = {n for n, p in gm.named_parameters() if p.requires_grad and n.startswith("two")}
    assert {"two.n.bias", "two.a.bias"} < trains and "two.b.beta" not in trains


def test_a_hooked_conv_is_frozen_as_it_is() -> None:
    model = Net()
    model.stem[0].register_forward_hook(lambda *a: None)
    gm, log = insert(model, train_bn=True)
    assert [s for s in log if s.refused] == [
        Site("stem.0", "it has hooks, which a fused site would drop; frozen as it is")
    ]
    assert {n for n, p in gm.named_parameters() if n.startswith("stem.0") and p.requires_grad} == {"stem.0.bias"}


def test_seed_and_head() -> None:
    line = [METHODS["tinytl"].passes(Options(seed=s, train_head=True))[1] for s in (0, 0, 1)]
    gm = fx.symbolic_trace(Net())
    states = [driver.rewrite(gm, [p], lambda *a: None)[0] for p in line]
    wide = [m.get_submodule("two.lite").get_parameter("wide") for m in states]
    assert torch.equal(wide[0], wide[1]) and not torch.equal(wide[0], wide[2])
    assert all(p.requires_grad for p in states[0].get_submodule("head").parameters())


@pytest.mark.parametrize("method", ["tinytl", "tinytl-trainbn"])
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
    assert trained[0] == trained[1] and len(trained[0]) == 20


def test_golden() -> None:
    golden(
        [tinytl()],
        nn.Sequential(Block()),
        X,
        """\
input_1 = input()
_0_a = TinySite[ReLU](input_1)  trains beta, bias  saves float64[12], float64[12], bool[2, 12, 6, 5]
_0_b = TinySite(_0_a)  trains beta  saves float64[8]
_0_lite = LiteResidual(input_1, _0_b)  trains wide, weight, bias, point, U, B  saves float64[2, 8, 3, 3],
    float64[2, 8, 3, 3], float64[2, 1], float64[2, 1], float64[2, 8, 3, 3], float64[2, 8, 3, 3], float64[2, 8,
    3, 3], float64[2, 1], float64[2, 1]
add = add(_0_b, _0_lite)
output = output(add)""",
    )
    golden(
        [tinytl(train_bn=True)],
        nn.Sequential(Block()),
        X,
        """\
input_1 = input()
_0_a = FrozenConv(input_1)  trains bias
_0_n = BatchNorm2d(_0_a)  trains bias  saves _0_a[2, 12, 6, 5]
_0_act = ReLU(_0_n)  saves _0_n[2, 12, 6, 5]
_0_b = FrozenConv(_0_act)
_0_m = BatchNorm2d(_0_b)  trains bias  saves _0_b[2, 8, 6, 5]
_0_lite = LiteResidual(input_1, _0_m)  trains wide, weight, bias, point, U, B  saves float64[2, 8, 3, 3],
    float64[2, 8, 3, 3], float64[2, 1], float64[2, 1], float64[2, 8, 3, 3], float64[2, 8, 3, 3], float64[2, 8,
    3, 3], float64[2, 1], float64[2, 1]
add = add(_0_m, _0_lite)
output = output(add)""",
    )


def inputs_of_two(m: Lambda, x: Tensor) -> Tensor:
    y = m.c(x)
    return m.fit(m.join((x, y)))  # type: ignore[no-any-return]


class Join(nn.Module):
    """Two convs that read two values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, xs: tuple[Tensor, Tensor]) -> Tensor:
        return self.a(xs[0]) + self.b(xs[1])  # type: ignore[no-any-return]


class Fork(Join):
    """Two convs of which both results are used."""

    def forward(self, x: Any) -> Any:
        return self.a(x), self.b(x)


def test_golden_refusals() -> None:
    def forked(m: Lambda, x: Tensor) -> Tensor:
        y, z = m.fork(x)
        return m.fit(y + z)  # type: ignore[no-any-return]

    golden(
        [tinytl()],
        Lambda(inputs_of_two, c=nn.Conv2d(8, 8, 1), join=Join(), fit=Block()),
        X,
        """\
x = x()
c = FrozenConv(x)  trains bias
join_a = FrozenConv(x)  trains bias
join_b = FrozenConv(c)  trains bias
add = add(join_a, join_b)
fit_a = TinySite[ReLU](add)  trains beta, bias  saves float64[12], float64[12], bool[2, 12, 6, 5]
fit_b = TinySite(fit_a)  trains beta  saves float64[8]
fit_lite = LiteResidual(add, fit_b)  trains wide, weight, bias, point, U, B  saves add[2, 8, 6, 5], float64[2,
    8, 3, 3], float64[2, 8, 3, 3], float64[2, 1], float64[2, 1], float64[2, 8, 3, 3], float64[2, 8, 3, 3],
    float64[2, 8, 3, 3], float64[2, 1], float64[2, 1]
add_1 = add(fit_b, fit_lite)
output = output(add_1)
# join: it reads 2 values from outside (x, c), not one""",
    )
    golden(
        [tinytl()],
        Lambda(forked, fork=Fork(), fit=Block()),
        X,
        """\
x = x()
fork_a = FrozenConv(x)  trains bias
fork_b = FrozenConv(x)  trains bias
add = add(fork_a, fork_b)
fit_a = TinySite[ReLU](add)  trains beta, bias  saves float64[12], float64[12], bool[2, 12, 6, 5]
fit_b = TinySite(fit_a)  trains beta  saves float64[8]
fit_lite = LiteResidual(add, fit_b)  trains wide, weight, bias, point, U, B  saves add[2, 8, 6, 5], float64[2,
    8, 3, 3], float64[2, 8, 3, 3], float64[2, 1], float64[2, 1], float64[2, 8, 3, 3], float64[2, 8, 3, 3],
    float64[2, 8, 3, 3], float64[2, 1], float64[2, 1]
add_1 = add(fit_b, fit_lite)
output = output(add_1)
# fork: 2 of its values are used outside (fork_a, fork_b), not one""",
    )
    up = nn.Sequential(nn.ConvTranspose3d(8, 8, 1), nn.Conv3d(8, 8, 1))
    model = Lambda(lambda m, x: m.fit(m.up(x[:, :, None])[:, :, 0]), up=up, fit=Block())
    golden(
        [tinytl()],
        model,
        X,
        """\
x = x()
getitem = getitem(x, (slice(None, None, None), slice(None, None, None), None))
up_0 = FrozenConv(getitem)  trains bias
up_1 = FrozenConv(up_0)  trains bias
getitem_1 = getitem(up_1, (slice(None, None, None), slice(None, None, None), 0))
fit_a = TinySite[ReLU](getitem_1)  trains beta, bias  saves float64[12], float64[12], bool[2, 12, 6, 5]
fit_b = TinySite(fit_a)  trains beta  saves float64[8]
fit_lite = LiteResidual(getitem_1, fit_b)  trains wide, weight, bias, point, U, B  saves up_1[2, 8, 6, 5],
    float64[2, 8, 3, 3], float64[2, 8, 3, 3], float64[2, 1], float64[2, 1], float64[2, 8, 3, 3], float64[2, 8,
    3, 3], float64[2, 8, 3, 3], float64[2, 1], float64[2, 1]
add = add(fit_b, fit_lite)
output = output(add)
# up: up.0 is a ConvTranspose3d: TinyTL's lite residual is defined for 2-D convs""",
    )
