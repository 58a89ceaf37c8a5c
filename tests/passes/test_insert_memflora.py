"""insert_memflora: which convs get an adapter, which stay frozen, and why."""

from typing import Any

import pytest
import torch
from graphs import golden, randomize, run_passes, show
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import Site
from floorplan.layers.fused import FusedConv
from floorplan.passes import fold_batchnorm
from floorplan.passes.insert_memflora import Insert, memflora

X = torch.randn(2, 8, 6, 5)


def insert(model: nn.Module, **options: Any) -> tuple[fx.GraphModule, list[Site]]:
    return run_passes(randomize(model), [fold_batchnorm.PASS, memflora(**options)], X)


def mixed() -> nn.Module:
    """Pointwise, depthwise, grouped and spatial convs, and one too narrow."""
    return nn.Sequential(
        nn.Conv2d(8, 12, 1),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 12, 3, groups=12),
        nn.Conv2d(12, 12, 1, groups=2),
        nn.Conv2d(12, 2, 3),
        nn.Conv2d(2, 3, 1),
    )


GRAPH = """\
input_1 = input()
_0 = {}(input_1)
_2 = {}(_0)
_3 = {}(_2)
_4 = {}(_3)
_5 = {}(_4)
output = output(_5)
# 2: depthwise: one input channel a group, so q would be as wide as the input; frozen"""
SITE, ADAPTED = "FusedConv", "FusedConv[rank=2]"
FULL = "# 5: its q is as wide as its input at this rank"
NARROW = "# 5: rank 2 is no smaller than its input width 2; frozen"


@pytest.mark.parametrize(
    "sites,modules,reasons",
    [
        (
            "auto",
            (ADAPTED, SITE, SITE, SITE, SITE),
            ["# 3: not a pointwise conv; frozen", "# 4: not a pointwise conv; frozen", NARROW],
        ),
        ("all", (ADAPTED, SITE, ADAPTED, ADAPTED, ADAPTED), [FULL]),
        (
            "ungrouped",
            (ADAPTED, SITE, SITE, ADAPTED, ADAPTED),
            ["# 3: grouped (2 groups); --sites all adapts it too; frozen", FULL],
        ),
        (
            "4, 9*",
            (SITE, SITE, SITE, ADAPTED, SITE),
            ["# 3: not matched by --sites 4, 9*; frozen", "# 5: not matched by --sites 4, 9*; frozen"],
        ),
    ],
)
def test_choice_of_sites(sites: str, modules: tuple[str, ...], reasons: list[str]) -> None:
    gm, log = insert(mixed(), sites=sites)
    lines = [GRAPH.format(*modules), *reasons]
    got = show(gm, log).splitlines()
    unmatched = [f"# 0: not matched by --sites {sites}; frozen"] if sites == "4, 9*" else []
    assert [x for x in got if x not in unmatched] == "\n".join(lines).splitlines()
    assert sum(p.numel() for p in gm.parameters() if p.requires_grad) == sum(
        m.U.numel() for m in gm.modules() if isinstance(m, FusedConv) and m.U is not None
    )


def test_without_depthwise_convs_auto_takes_spatial_ones_too() -> None:
    gm, log = insert(nn.Sequential(nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 1, groups=2)))
    assert show(gm, log) == (
        "input_1 = input()\n_0 = FusedConv[rank=2](input_1)\n_1 = FusedConv(_0)\n"
        "output = output(_1)\n# 1: grouped (2 groups); --sites all adapts it too; frozen"
    )


def test_what_cannot_be_a_site_is_frozen_as_it_is() -> None:
    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda *a: None)
    gm, log = insert(nn.Sequential(nn.Conv2d(8, 4, 3), hooked))
    assert show(gm, log) == (
        "input_1 = input()\n_0 = FusedConv[rank=2](input_1)\n_1 = Conv2d(_0)\n"
        "output = output(_1)\n# 1: it has hooks, which a fused site would drop; frozen as it is"
    )
    assert not any(p.requires_grad for n, p in gm.named_parameters() if not n.endswith("U"))


def test_output_size_is_frozen_as_it_is() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.conv(x), output_size=[13, 10])  # type: ignore[no-any-return]

    gm, log = insert(Up())
    assert log[-1].refused == ("it is called with output_size, which a site does not take; frozen as it is")
    assert isinstance(gm.up, nn.ConvTranspose2d)


def test_shared_conv_gets_one_adapter() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))  # type: ignore[no-any-return]

    gm, log = insert(Twice())
    assert [s.node for s in log] == ["conv"]
    assert [n for n, _ in gm.named_parameters()] == ["conv.U"]


def test_seed_and_start() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3))
    draws = [insert(model, seed=s)[0] for s in (0, 0, 1)]
    states = [gm.state_dict() for gm in draws]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not torch.equal(states[0]["0.P"], states[2]["0.P"])
    assert not torch.equal(states[0]["0.P"], states[0]["1.P"])
    assert not states[0]["0.U"].any() and not states[0]["1.U"].any()
    torch.testing.assert_close(draws[0](X.double()), model.double()(X.double()))


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": -1}])
def test_rank_must_be_positive(options: dict[str, int]) -> None:
    with pytest.raises(FloorplanError, match="^rank -?[01]: an adapter has a whole rank of 1 or more$"):
        insert(mixed(), **options)


def test_nothing_to_adapt_is_an_error() -> None:
    match = r"^no conv was adapted \(5 looked at with --sites nope --rank 2\); try --sites all"
    with pytest.raises(FloorplanError, match=match):
        insert(mixed(), sites="nope")


def test_train_head() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(120, 5), nn.Linear(5, 3))
    gm, _ = insert(model, train_head=True)
    trained = [n for n, p in gm.named_parameters() if p.requires_grad]
    assert trained == ["0.U", "3.weight", "3.bias"]
    with pytest.raises(FloorplanError, match="^--train-head: the model has no Linear layer"):
        insert(mixed(), train_head=True)


def test_everything_else_is_frozen_in_train_mode_too() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(120, 5))
    gm, _ = insert(model)
    assert [n for n, p in gm.train().named_parameters() if p.requires_grad] == ["0.U"]


def test_options_are_the_passes_own() -> None:
    p = memflora(rank=3, sites="all", seed=5, train_head=True)
    assert p.name == "insert_memflora" and p.run == Insert(3, "all", 5, True)


LINE = [fold_batchnorm.PASS, memflora(2, "auto")]


def test_golden() -> None:
    golden(
        LINE,
        nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 1)),
        X,
        """\
input_1 = input()
_0 = FusedConv[rank=2](input_1)  trains U  saves float64[2, 2, 6, 5]
_2 = ReLU(_0)  saves _2[2, 12, 4, 3]
_3 = FusedConv[rank=2](_2)  trains U  saves float64[2, 2, 4, 3]
output = output(_3)""",
    )


def test_golden_choices() -> None:
    """Depthwise, too narrow, grouped; not pointwise; not matched."""
    golden(
        LINE,
        mixed()[2:],
        X[:, :1].expand(-1, 12, -1, -1),
        """\
input_1 = input()
_2 = FusedConv(input_1)
_3 = FusedConv(_2)
_4 = FusedConv[rank=2](_3)  trains U  saves float64[2, 2, 4, 3]
_5 = FusedConv(_4)
output = output(_5)
# 2: depthwise: one input channel a group, so q would be as wide as the input; frozen
# 3: grouped (2 groups); --sites all adapts it too; frozen
# 5: rank 2 is no smaller than its input width 2; frozen""",
    )
    golden(
        [memflora(2, "auto")],
        nn.Sequential(nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 3)),
        X,
        """\
input_1 = input()
_0 = FusedConv(input_1)
_1 = FusedConv[rank=2](_0)  trains U  saves float64[2, 2, 6, 5]
output = output(_1)
# 0: grouped (2 groups); --sites all adapts it too; frozen""",
    )
    golden(
        [memflora(2, "1")],
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)),
        X,
        """\
input_1 = input()
_0 = FusedConv(input_1)
_1 = FusedConv[rank=2](_0)  trains U  saves float64[2, 2, 6, 5]
output = output(_1)
# 0: not matched by --sites 1; frozen""",
    )


class Sized(nn.Module):
    """A conv that is called with more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.c = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.up(x, output_size=[13, 10]))  # type: ignore[no-any-return]


def test_golden_refusals() -> None:
    """What stays a conv: a parametrized weight, hooks, a forward of its own, more arguments."""
    fit, hooked, odd = (nn.Conv2d(8, 8, 1) for _ in range(3))
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1))
    hooked.register_forward_hook(lambda *a: None)
    odd.forward = lambda x: x * 2  # type: ignore[method-assign, assignment]
    golden(
        LINE,
        nn.Sequential(fit, normed, hooked, odd),
        X,
        """\
input_1 = input()
_0 = FusedConv[rank=2](input_1)  trains U  saves float64[2, 2, 6, 5]
_1 = ParametrizedConv2d(_0)  saves _0[2, 8, 6, 5], float64[8, 8, 1, 1]
_2 = Conv2d(_1)  saves _1[2, 8, 6, 5]
_3 = Conv2d(_2)
output = output(_3)
# 1: its weight is parametrized; remove the parametrization first (leave_parametrized=True); frozen as it is
# 2: it has hooks, which a fused site would drop; frozen as it is
# 3: Conv2d has a forward of its own; frozen as it is""",
    )
    golden(
        LINE,
        Sized(),
        X,
        """\
x = x()
up = ConvTranspose2d(x, output_size=[13, 10])
c = FusedConv[rank=2](up)  trains U  saves float64[2, 2, 13, 10]
output = output(c)
# up: it is called with output_size, which a site does not take; frozen as it is""",
    )
