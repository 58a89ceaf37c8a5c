"""Which nodes have a straight-line rule: the others run under autograd."""

from typing import Any

import pytest
import torch
from hard_nets import Lambda
from torch import Tensor, fx, nn

from floorplan.graph.fold import to_affine, to_site
from floorplan.graph.trace import trace
from floorplan.layers.activations import PackedActivation
from floorplan.step.rules import RULES, rule_of
from floorplan.step.studied import studied

X = torch.randn(2, 4, 6, 5)


def rule(run: Any, x: Tensor = X, **layers: nn.Module) -> str:
    """The name of the last node's rule, "" for none."""
    gm = trace(Lambda(run, **layers), (x,)).gm
    s = studied(gm, (x,))
    node = s.output.args[0]
    assert isinstance(node, fx.Node)
    found = rule_of(node, gm, s.values)
    assert s.rules.get(node.name) is found
    return next((name for name, r in RULES.items() if r is found), "")


def site(act: nn.Module | None = None, hook: bool = False, plain: bool = False) -> Any:
    s: Any = to_site(nn.Conv2d(4, 4, 3, padding=1))
    s.adapt(2, torch.Generator())
    if act is not None:
        s.set_activation(act)
    if hook:
        s.register_forward_hook(lambda *a: None)
    s.plain = plain
    return s


@pytest.mark.parametrize(
    "options,name", [({}, "site"), ({"act": nn.ReLU()}, "site"), ({"hook": True}, ""), ({"plain": True}, "")], ids=str
)
def test_sites(options: dict[str, Any], name: str) -> None:
    assert rule(lambda m, x: m.s(x), s=site(**options)) == name
    assert rule(lambda m, x: m.s(x, x), s=site(**options)) == name


def test_a_site_needs_a_batch_and_a_skip_of_its_own_kind() -> None:
    assert rule(lambda m, x: m.s(x), X[0], s=site()) == ""
    assert rule(lambda m, x: m.s(x, x[0]), s=site()) == ""
    assert rule(lambda m, x: m.s(x, x.half()), s=site()) == ""
    assert rule(lambda m, x: m.s(x, x.mean((2, 3), keepdim=True)), s=site()) == "site"
    assert rule(lambda m, x: m.s(x[:, :1], x), s=to_site(nn.Conv2d(1, 1, 1))) == ""  # the skip is wider than it


def test_affines_and_gates() -> None:
    assert rule(lambda m, x: m.n(x), n=to_affine(nn.BatchNorm2d(4))) == "affine"
    assert rule(lambda m, x: m.n(x[:, :, 0, 0]), n=to_affine(nn.BatchNorm1d(4))) == ""
    assert rule(lambda m, x: m.a(x), a=PackedActivation.of(nn.ReLU6())) == "activation"
    slope = nn.PReLU(4).requires_grad_(False)
    assert rule(lambda m, x: m.a(x), a=PackedActivation.of(slope)) == ""
    assert rule(lambda m, x: m.a(x), a=nn.ReLU()) == ""


def test_adds_of_maps_of_one_shape() -> None:
    assert rule(lambda m, x: x + x * 1) == "add" and rule(lambda m, x: torch.add(x, x)) == "add"
    assert rule(lambda m, x: x + 1) == rule(lambda m, x: torch.add(x, x, alpha=2)) == ""
    assert rule(lambda m, x: x + x[:1]) == rule(lambda m, x: x + x.double()) == ""
    assert rule(lambda m, x: x[:, :, 0, 0] + x[:, :, 0, 1]) == rule(lambda m, x: x * x) == ""
