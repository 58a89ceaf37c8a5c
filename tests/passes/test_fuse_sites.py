"""fuse_sites: what a site draws in, in every order, and what it must leave alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import picture, randomize, show, site_at
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from floorplan.graph.driver import Check, Pass, Site, rewrite
from floorplan.graph.trace import trace
from floorplan.layers.fused import FusedConv
from floorplan.methods.verify import Verifier
from floorplan.passes import canonicalize, fold_batchnorm, fuse_sites
from floorplan.passes.insert_memflora import memflora

X = torch.randn(2, 4, 6, 5)


class Net(nn.Module):
    """Convs and activations for a forward given as a function."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.bn, self.one = nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.silu = nn.SiLU()
        self.call = forward

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def outputs_only(_: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """For graphs that write into a conv's input, which plain autograd refuses to differentiate."""
    with torch.no_grad():
        want, got = (tree_leaves(gm(X.double())) for gm in (before, after))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def fuse(forward: Any, check: Check | None = None) -> tuple[fx.GraphModule, list[Site]]:
    """Trace and run the passes up to fuse_sites, each verified in float64."""
    model = randomize(Net(forward)).double().eval()
    gm = trace(model, (X.double(),)).gm
    passes = [canonicalize.PASS, fold_batchnorm.PASS, memflora(2, "all"), fuse_sites.PASS]
    after, log = rewrite(gm, passes, check or Verifier([X]))
    return after, log["fuse_sites"]


def golden(forward: Any, want: str, check: Check | None = None) -> None:
    assert show(*fuse(forward, check)) == want


R, S, T = "FusedConv[rank=2]", "FusedConv[rank=2, ReLU]", "output = output"


def test_residual_block() -> None:
    golden(lambda m, x: m.relu(m.bn(m.b(F.relu(m.a(x)))) + x), f"x = x()\na = {S}(x)\nb = {S}(a, x)\n{T}(b)")


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.a(x) + x,
        lambda m, x: x + m.a(x),
        lambda m, x: torch.add(x, m.a(x)),
        lambda m, x: m.a(x).add(x),
        lambda m, x: m.a(x).add_(x),
    ],
)
def test_every_spelling_of_an_add(forward: Any) -> None:
    golden(forward, f"x = x()\na = {R}(x, x)\n{T}(a)")


def plus_equals(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y += x
    return F.relu(y, inplace=True)


def test_plus_equals_on_the_site() -> None:
    golden(plus_equals, f"x = x()\na = {S}(x, x)\n{T}(a)")


def test_both_operands_are_sites() -> None:
    golden(lambda m, x: m.relu(m.a(x) + m.b(x)), f"x = x()\na = {R}(x)\nb = {S}(x, a)\n{T}(b)")


def test_three_sites_in_a_chain_of_adds() -> None:
    golden(lambda m, x: m.a(x) + m.b(x) + m.c(x), f"x = x()\na = {R}(x)\nb = {R}(x, a)\nc = {R}(x, b)\n{T}(c)")


def test_skip_defined_after_the_site() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return y + m.silu(x)  # type: ignore[no-any-return]

    golden(forward, f"x = x()\nsilu = SiLU(x)\na = {R}(x, silu)\n{T}(a)")


@pytest.mark.parametrize("order", [1, -1])
def test_broadcast_skip(order: int) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        pair = (m.a(x), m.silu(x.mean((2, 3), keepdim=True)))[::order]
        return m.relu(pair[0] + pair[1])

    gm, log = fuse(forward)
    assert f"a = {S}(x, silu)" in show(gm, log) and not any(s.refused for s in log)


def test_site_narrower_than_its_skip() -> None:
    golden(lambda m, x: m.relu(x + m.one(x)), f"x = x()\none = {S}(x, x)\n{T}(one)")


def test_skip_twice() -> None:
    golden(lambda m, x: m.a(x) + x + x, f"x = x()\na = {R}(x, x)\nadd_1 = add(a, x)\n{T}(add_1)")


def test_a_site_added_to_itself_is_left() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return y + y

    golden(forward, f"x = x()\na = {R}(x)\nadd = add(a, a)\n{T}(add)")


def test_add_with_other_readers_of_the_site() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return y + x, y

    golden(forward, f"x = x()\na = {R}(x)\nadd = add(a, x)\n{T}((add, a))\n# add: a has other readers")


def test_plus_equals_into_what_is_read_later() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        s = m.silu(x)
        y = s
        y += m.a(x)
        return y, s * 2

    gm, log = fuse(forward)
    assert [(s.node, s.refused) for s in log] == [("add", "")] or "overwrites" in log[0].refused


def test_plus_equals_into_a_view_that_is_read_later() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        s = m.silu(x)
        whole = s.view(2, -1)
        s += m.a(x)
        return s, whole * 2

    gm, log = fuse(forward)
    assert log[0].refused == "+= overwrites silu, which mul reads"
    assert "iadd(silu, a)" in show(gm, [])


def test_plus_equals_into_the_callers_input() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        x += y
        return m.c(x)

    gm, log = fuse(forward, lambda *a: None)
    assert log[0].refused == "+= writes into x, which is not the graph's own"


def test_skip_written_before_the_add() -> None:
    """The site may not read the skip early; it moves down to the add instead."""

    def forward(m: Any, x: Tensor) -> Any:
        s = m.silu(x)
        y = m.a(x)
        m.relu_(s)
        return y + s

    golden(forward, f"x = x()\nsilu = SiLU(x)\nrelu_ = ReLU(silu)\na = {R}(x, silu)\n{T}(a)")


def test_input_written_before_the_add() -> None:
    """The site may not read its input late; the skip is there already."""

    def forward(m: Any, x: Tensor) -> Any:
        s, t = m.silu(x), m.silu(x) * 2
        y = m.a(t)
        m.relu_(t)
        return y + s, m.c(t)

    gm, log = fuse(forward, outputs_only)
    text = show(gm, log)
    assert f"a = {R}(mul, silu)" in text and text.index("a = ") < text.index("relu_ = ")


def test_input_and_skip_written_before_the_add() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        t = m.silu(x) * 2
        y = m.a(t)
        m.relu_(t)
        return y + t

    golden(
        forward,
        f"x = x()\nsilu = SiLU(x)\nmul = mul(silu, 2)\na = {R}(mul)\nrelu_ = ReLU(mul)\n"
        f"add = add(a, mul)\n{T}(add)\n"
        "# add: relu_ writes in place into what a reads, before the add",
        outputs_only,
    )


def test_activation_with_other_readers_of_the_site() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return m.relu(y), y

    golden(forward, f"x = x()\na = {R}(x)\nrelu = ReLU(a)\n{T}((relu, a))\n# relu: a has other readers")


def test_activation_with_two_readers() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.relu_(m.a(x))
        return m.relu(m.b(y) + y)

    golden(forward, f"x = x()\na = {S}(x)\nb = {S}(a, a)\n{T}(b)")


def test_second_activation() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return F.relu6(F.leaky_relu(m.a(x), 0.1))

    text = "x = x()\na = FusedConv[rank=2, LeakyReLU](x)\nrelu6 = ReLU6(a)\noutput = output(relu6)"
    gm, log = fuse(forward)
    assert show(gm, log) == text
    again = list(fuse_sites.PASS.run(gm))
    assert show(gm, again) == f"{text}\n# relu6: a ends in a LeakyReLU already"


def test_what_has_no_gate_stays() -> None:
    golden(lambda m, x: m.silu(m.a(x)), f"x = x()\na = {R}(x)\nsilu = SiLU(a)\n{T}(silu)")


def test_hooked_activation_stays() -> None:
    net = Net(None)
    gm = fx.GraphModule(net, _graph([("a", "x"), ("relu", "a")]))
    net.relu.register_forward_hook(lambda *a: None)
    after, log = rewrite(gm, [memflora(2), fuse_sites.PASS], lambda *a: None)
    assert [s.refused for s in log["fuse_sites"]] == ["it has hooks, which a fused site would drop"]
    assert isinstance(after.relu, nn.ReLU)


def _graph(calls: list[tuple[str, str]]) -> fx.Graph:
    graph = fx.Graph()
    values = {"x": graph.placeholder("x")}
    for path, arg in calls:
        values[path] = graph.call_module(path, (values[arg],))
    graph.output(values[calls[-1][0]])
    return graph


def test_shared_conv_becomes_twins_on_one_adapter() -> None:
    gm, log = fuse(lambda m, x: m.relu(m.a(m.a(x))))
    assert show(gm, log) == f"x = x()\na = {R}(x)\na_1 = {S}(a)\n{T}(a_1)"
    assert site_at(gm, "a_1").U is site_at(gm, "a").U
    assert site_at(gm, "a_1").weight is site_at(gm, "a").weight
    assert [n for n, _ in gm.named_parameters()] == ["a.U"]


@pytest.mark.parametrize(
    "pads,mode,padding",
    [
        ((1, 2, 0, 3), "constant", ((1, 4), (2, 3))),  # the conv pads by 1 itself
        ((1, 2), "constant", ((1, 1), (2, 3))),
    ],
)
def test_pad_in_front(pads: Any, mode: str, padding: Any) -> None:
    gm, log = fuse(lambda m, x: m.a(F.pad(x, pads, mode)))
    assert show(gm, log) == f"x = x()\na = {R}(x)\n{T}(a)"
    assert site_at(gm, "a").geo.padding == padding


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pad_of_another_mode(mode: str) -> None:
    gm, log = fuse(lambda m, x: m.one(F.pad(x, (2, 1, 0, 3), mode)))
    assert site_at(gm, "one").geo.padding == ((0, 3), (2, 1)) and site_at(gm, "one").geo.mode == mode
    assert len(gm.graph.nodes) == 3


def test_pad_read_by_two_sites() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        p = F.pad(x, (1, 0))
        return m.a(p), m.b(p)

    golden(forward, f"x = x()\na = {R}(x)\nb = {R}(x)\n{T}((a, b))")


@pytest.mark.parametrize(
    "pads,mode,value,reason",
    [
        ((-1, 0), "constant", None, "negative padding crops"),
        ((1, 0), "constant", 2.0, "pads with 2.0, which does not commute with the projection"),
        ((1, 1, 1, 1), "reflect", None, "reflect padding before a conv that pads by itself"),
        ((0, 0, 0, 0, 0, 0, 1, 0), "constant", None, "pads batch or channels"),
    ],
)
def test_pad_refused(pads: Any, mode: str, value: Any, reason: str) -> None:
    gm, log = fuse(lambda m, x: m.a(F.pad(x, pads, mode, value)))
    assert show(gm, log).splitlines()[-1] == f"# pad: {reason}"
    assert any(n.target is F.pad for n in gm.graph.nodes)


def test_pad_before_a_transposed_conv_is_refused() -> None:
    net = Net(None)
    net.up = nn.ConvTranspose2d(4, 3, 2, 2)
    net.call = lambda m, x: m.up(F.pad(x, (1, 0)))
    gm = trace(net.double().eval(), (X.double(),)).gm
    passes = [canonicalize.PASS, memflora(2, "all"), fuse_sites.PASS]
    _, log = rewrite(gm, passes, Verifier([X]))
    assert [s.refused for s in log["fuse_sites"]] == ["padding before a transposed conv"]


def test_pad_computed_while_running_is_refused() -> None:
    gm, log = fuse(lambda m, x: m.a(F.pad(x, (x.size(0) - 1, 0))))
    assert log[0].refused == "padding is computed at run time"


def test_pad_whose_input_is_written_meanwhile_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        s = m.silu(x)
        p = F.pad(s, (1, 1))
        m.relu_(s)
        return m.a(p), s

    gm, log = fuse(forward)
    assert log[0].refused == "relu_ writes into silu before a reads the padded copy"


def test_train_mode_computes_the_same() -> None:
    gm, _ = fuse(lambda m, x: m.relu(m.bn(m.b(F.relu(m.a(x)))) + x))
    with torch.no_grad():
        want = gm.eval()(X.double())
    for mode in (True, False):
        torch.testing.assert_close(gm.train(mode)(X.double()), want, rtol=0, atol=0)
    sites = [m for m in gm.modules() if isinstance(m, FusedConv)]
    assert len(sites) == 2 and all(m.act is not None for m in sites)


def pictured(forward: Any, want: str, check: Check | None = None) -> None:
    assert_expected_inline(picture(*fuse(forward, check), X), want, skip=1)


def test_golden() -> None:
    pictured(
        lambda m, x: m.relu(m.bn(m.b(F.relu6(m.a(F.pad(x, (1, 1)))[..., 1:-1]))) + x),
        """\
x = x()
a = FusedConv[rank=2](x)  trains U  saves float64[2, 2, 6, 5]
getitem = getitem(a, (Ellipsis, slice(1, -1, None)))
relu6 = ReLU6(getitem)  saves a[2, 4, 6, 5]
b = FusedConv[rank=2, ReLU](relu6, x)  trains U  saves float64[2, 2, 6, 5], uint8[30]
output = output(b)""",
    )
    pictured(
        lambda m, x: m.one(F.pad(x, (2, 1, 0, 3), "reflect")),
        """\
x = x()
one = FusedConv[rank=2](x)  trains U  saves float64[2, 2, 6, 5]
output = output(one)""",
    )


def test_golden_refused_paddings() -> None:
    pictured(
        lambda m, x: m.a(F.pad(x, (-1, 0))),
        """\
x = x()
pad = pad(x, pad=(-1, 0), mode=constant, value=None)
a = FusedConv[rank=2](pad)  trains U  saves float64[2, 2, 6, 4]
output = output(a)
# pad: negative padding crops""",
    )
    pictured(
        lambda m, x: m.a(F.pad(x, (1, 0), value=2.0)),
        """\
x = x()
pad = pad(x, pad=(1, 0), mode=constant, value=2.0)
a = FusedConv[rank=2](pad)  trains U  saves float64[2, 2, 6, 6]
output = output(a)
# pad: pads with 2.0, which does not commute with the projection""",
    )
    pictured(
        lambda m, x: m.a(F.pad(x, (1, 1, 1, 1), "reflect")),
        """\
x = x()
pad = pad(x, pad=(1, 1, 1, 1), mode=reflect, value=None)
a = FusedConv[rank=2](pad)  trains U  saves float64[2, 2, 8, 7]
output = output(a)
# pad: reflect padding before a conv that pads by itself""",
    )
    pictured(
        lambda m, x: m.a(F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))),
        """\
x = x()
pad = pad(x, pad=(0, 0, 0, 0, 0, 0, 1, 0), mode=constant, value=None)
a = FusedConv[rank=2](pad)  trains U  saves float64[3, 2, 6, 5]
output = output(a)
# pad: pads batch or channels""",
    )
    pictured(
        lambda m, x: m.a(F.pad(x, (x.size(0) - 1, 0))),
        """\
x = x()
size = size(x, 0)
sub = sub(size, 1)
pad = pad(x, pad=(sub, 0), mode=constant, value=None)
a = FusedConv[rank=2](pad)  trains U  saves float64[2, 2, 6, 6]
output = output(a)
# pad: padding is computed at run time""",
    )
    pictured(
        pad_then_write,
        """\
x = x()
silu = SiLU(x)
pad = pad(silu, pad=(1, 1), mode=constant, value=None)
relu_ = ReLU(silu)
a = FusedConv[rank=2](pad)  trains U  saves float64[2, 2, 6, 7]
output = output((a, silu))
# pad: relu_ writes into silu before a reads the padded copy""",
    )


def pad_then_write(m: Any, x: Tensor) -> Any:
    s = m.silu(x)
    p = F.pad(s, (1, 1))
    m.relu_(s)
    return m.a(p), s


def into_a_view(m: Any, x: Tensor) -> Any:
    s = m.silu(x)
    whole = s.view(2, -1)
    s += m.a(x)
    return s, whole * 2


def into_the_input(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    x += y
    return m.c(x)


def test_golden_refused_adds() -> None:
    pictured(
        into_a_view,
        """\
x = x()
silu = SiLU(x)
view = view(silu, 2, -1)
a = FusedConv[rank=2](x)  trains U  saves float64[2, 2, 6, 5]
iadd = iadd(silu, a)
mul = mul(view, 2)
output = output((iadd, mul))
# iadd: += overwrites silu, which mul reads""",
    )
    pictured(
        into_the_input,
        """\
x = x()
a = FusedConv[rank=2](x)  trains U  saves float64[2, 2, 6, 5]
iadd = iadd(x, a)
c = FusedConv[rank=2](iadd)  trains U  saves float64[2, 2, 6, 5]
output = output(c)
# iadd: += writes into x, which is not the graph's own""",
        lambda *a: None,
    )
