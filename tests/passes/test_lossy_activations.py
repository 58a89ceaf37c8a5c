"""The lossy pass: off by default, replaces what it can, refuses with a reason."""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import picture
from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import rewrite
from floorplan.layers.lossy import LossyActivation
from floorplan.passes import pipeline
from floorplan.passes.insert_memflora import memflora
from floorplan.passes.lossy_activations import approximate, lossy


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Softsign(), nn.ReLU()))


def test_not_in_the_pipeline() -> None:
    assert lossy(4).name not in [getattr(p, "name", "") for p in pipeline(memflora())]


def test_replaced_refused_or_not_looked_at() -> None:
    gm, log = rewrite(graph(), [lossy(4, "minimax")], lambda p, before, after: None)
    sites = {s.node: s for s in log["lossy_activations"]}
    assert set(sites) == {"_1", "_2"}
    assert "LOSSY" in sites["_1"].note and not sites["_1"].refused
    assert "no few-bit" in sites["_2"].refused
    assert isinstance(gm.get_submodule("1"), LossyActivation)


def test_approximate_leaves_the_graph_alone() -> None:
    gm, x = graph(), torch.randn(2, 3, 4, 4)
    twin, _ = approximate(gm, 2)
    assert type(gm.get_submodule("1")) is nn.SiLU and torch.equal(gm(x), twin(x))
    assert [id(p) for p in gm.parameters()] == [id(p) for p in twin.parameters()]


def test_options_that_do_not_fit() -> None:
    with pytest.raises(FloorplanError, match="1 to 8"):
        lossy(0)
    with pytest.raises(FloorplanError, match="fit"):
        lossy(2, "guess")


def test_golden() -> None:
    gm, log = approximate(graph(), 4, "minimax")
    assert_expected_inline(
        picture(gm, log, torch.randn(2, 3, 4, 4)),
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains weight, bias  saves input_1[2, 3, 4, 4]
_1 = LossyActivation[SiLU](_0)  saves uint8[64]
_2 = Softsign(_1)  saves _1[2, 4, 4, 4], float32[2, 4, 4, 4], _1[2, 4, 4, 4]
_3 = ReLU(_2)  saves _3[2, 4, 4, 4]
output = output(_3)
# _1: LOSSY gradient, bits=4, |error| <= 0.03749 |g|, fit=minimax
# _2: Softsign has no few-bit derivative; known are SiLU, Hardswish, GELU, Mish, ELU, Tanh, Sigmoid, Softplus""",
    )
