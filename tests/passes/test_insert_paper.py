"""insert_paper: every conv-BatchNorm(-activation) becomes one site, adapted or frozen."""

import math
from typing import Any

import pytest
import torch
from graphs import golden, randomize, run_passes
from hard_nets import Lambda
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import Site
from floorplan.layers.paper import PaperSite
from floorplan.passes import canonicalize
from floorplan.passes.insert_paper import paper

X = torch.randn(2, 8, 6, 5)


def insert(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[fx.GraphModule, list[Site]]:
    line = [canonicalize.PASS, paper(**options)]
    return run_passes(randomize(model), line, *(inputs or (X,)))


def nodes(gm: fx.GraphModule) -> list[str]:
    """Every call, a site with its rank and activation."""
    found = []
    for n in gm.graph.nodes:
        if n.op != "call_module":
            found += [] if n.op in ("placeholder", "output") else [n.name]
            continue
        m = gm.get_submodule(str(n.target))
        name = type(m).__name__
        if isinstance(m, PaperSite):
            name += f"[{m.rank}]" + ("" if m.act is None else f"+{type(m.act).__name__}")
        found.append(name)
    return found


def net(m: Any, x: Tensor) -> Tensor:
    y = m.relu(m.b1(m.c1(m.pre(x))))
    y = m.relu6(m.b2(m.depth(y)))
    return m.tail(torch.relu(m.b3(m.c3(y)) + x))


def mobile() -> nn.Module:
    """Expand, depthwise, project beside a shortcut, a BatchNorm of its own, a bare conv."""
    return Lambda(
        net,
        pre=nn.BatchNorm2d(8),
        c1=nn.Conv2d(8, 12, 1),
        b1=nn.BatchNorm2d(12),
        relu=nn.ReLU(),
        depth=nn.Conv2d(12, 12, 3, padding=1, groups=12),
        b2=nn.BatchNorm2d(12),
        relu6=nn.ReLU6(),
        c3=nn.Conv2d(12, 8, 1, bias=False),
        b3=nn.BatchNorm2d(8),
        tail=nn.Conv2d(8, 4, 3),
    )


def test_every_site_of_a_block() -> None:
    gm, log = insert(mobile())
    assert nodes(gm) == [
        "PaperSite[0]",
        "PaperSite[2]+ReLU",
        "PaperSite[0]+ReLU6",
        "PaperSite[2]",
        "add",
        "ReLU",
        "Conv2d",
    ]
    frozen = "frozen: keeps its gate and its scale"
    assert [(s.node, s.note) for s in log] == [("pre", frozen), ("c1", ""), ("depth", frozen), ("c3", "")]
    assert {n for n, p in gm.named_parameters() if p.requires_grad} == {"c1.U", "c3.U"}


def test_the_branch_starts_at_zero_and_is_drawn_from_the_seed() -> None:
    sites: list[Any] = [insert(mobile(), seed=s)[0].get_submodule("c1") for s in (0, 0, 1)]
    assert torch.equal(sites[0].P, sites[1].P) and not torch.equal(sites[0].P, sites[2].P)
    assert sites[0].P.shape == (2, 8, 1, 1) and sites[0].U.shape == (12, 2, 1, 1)
    assert not any(s.U.any() for s in sites)
    wide: Any = insert(nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)), rank=4, sites="all")[0]
    big: Any = insert(nn.Sequential(nn.Conv2d(4096, 4, 1), nn.BatchNorm2d(4)), torch.randn(1, 4096, 1, 1), rank=4)[0]
    assert wide.get_submodule("0").P.shape == (4, 8, 1, 1)
    assert abs(float(big.get_submodule("0").P.std()) * math.sqrt(4) - 1) < 0.02


@pytest.mark.parametrize(
    "options,want",
    [
        ({"sites": "c1"}, ["PaperSite[0]", "PaperSite[2]+ReLU", "PaperSite[0]+ReLU6", "PaperSite[0]"]),
        ({"sites": "all", "rank": 8}, ["PaperSite[0]", "PaperSite[8]+ReLU", "PaperSite[0]+ReLU6", "PaperSite[8]"]),
    ],
)
def test_the_choice_of_sites(options: dict[str, Any], want: list[str]) -> None:
    assert nodes(insert(mobile(), **options)[0])[:4] == want


def test_grouped_and_shared_convs_stay_frozen() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.b1(m.grouped(x))
        return m.b4(m.last(m.b2(m.twice(y)) + m.b3(m.twice(y))))

    model = Lambda(
        run,
        grouped=nn.Conv2d(8, 8, 3, groups=2),
        b1=nn.BatchNorm2d(8),
        twice=nn.Conv2d(8, 8, 1),
        b2=nn.BatchNorm2d(8),
        b3=nn.BatchNorm2d(8),
        last=nn.Conv2d(8, 4, 1),
        b4=nn.BatchNorm2d(4),
    )
    gm, _ = insert(model, sites="all")
    assert nodes(gm) == ["PaperSite[0]", "Conv2d", "PaperSite[0]", "Conv2d", "PaperSite[0]", "add", "PaperSite[2]"]


def test_a_conv_or_a_batchnorm_that_others_read_is_not_drawn_in() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        z = m.b1(y)
        return m.b2(m.last(z + y + m.relu(z)))

    model = Lambda(
        run,
        conv=nn.Conv2d(8, 8, 1),
        b1=nn.BatchNorm2d(8),
        relu=nn.ReLU(),
        last=nn.Conv2d(8, 4, 1),
        b2=nn.BatchNorm2d(4),
    )
    assert nodes(insert(model)[0]) == ["Conv2d", "PaperSite[0]", "add", "ReLU", "add_1", "PaperSite[2]"]


def test_one_batchnorm_behind_two_convs_becomes_two_sites() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.bn(m.a(x)) + m.bn(m.b(x)) + m.bn(x)

    model = Lambda(run, a=nn.Conv2d(8, 8, 1), b=nn.Conv2d(8, 8, 3, padding=1), bn=nn.BatchNorm2d(8))
    gm, _ = insert(model)
    assert nodes(gm) == ["PaperSite[2]", "PaperSite[2]", "add", "PaperSite[0]", "add_1"]


def test_what_is_no_fixed_affine_map_is_left() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 4, 1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.SiLU(),
    )
    gm, log = insert(model)
    assert nodes(gm) == ["PaperSite[2]", "Conv2d", "BatchNorm2d", "SiLU"]
    assert log[0] == Site("_3", "no running statistics: it normalises by the batch in eval mode too; frozen as it is")


def test_starts_as_the_source_and_stays_in_eval_form() -> None:
    source = randomize(mobile()).double().eval()
    gm, _ = insert(mobile())
    x = X.double()
    torch.manual_seed(0)
    twin, _ = run_passes(source, [canonicalize.PASS, paper()], X)
    want = source(x)
    assert float((twin(x) - want).detach().abs().max()) < 1e-12 * float(want.detach().abs().max())
    assert torch.equal(twin.train()(x), twin.eval()(x)) and len(list(gm.parameters())) > 2


def test_a_model_without_such_a_conv_is_refused() -> None:
    for model in (nn.Sequential(nn.Conv2d(8, 4, 1)), mobile()):
        with pytest.raises(FloorplanError, match="^memflora-paper: no conv with a BatchNorm behind it"):
            insert(model, sites="nothing")


def test_golden() -> None:
    golden(
        [paper()],
        nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()),
        X,
        """\
input_1 = input()
_0 = PaperSite[rank=2, ReLU6](input_1)  trains U  saves float64[4], float64[2, 2, 6, 5], uint8[12]
output = output(_0)""",
    )


def test_golden_refusals() -> None:
    """A BatchNorm alone, one behind a grouped conv, one without statistics."""
    model = nn.Sequential(
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 1, groups=8),
        nn.BatchNorm2d(8),
        nn.BatchNorm2d(8, track_running_stats=False),
    )
    golden(
        [paper()],
        model,
        X,
        """\
input_1 = input()
_0 = PaperSite(input_1)
_1 = PaperSite[rank=2](_0)  trains U  saves float64[8], float64[2, 2, 6, 5]
_3 = PaperSite(_1)  saves float64[8]
_5 = BatchNorm2d(_3)  saves _3[2, 8, 6, 5], float64[8], float64[8]
output = output(_5)
# _5: no running statistics: it normalises by the batch in eval mode too; frozen as it is
# 0: frozen: keeps its gate and its scale
# 3: frozen: keeps its gate and its scale""",
    )
