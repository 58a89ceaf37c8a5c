"""A model traced and rewritten by a method: what is refused before anything is run, and what is noted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hard_nets import Lambda
from small import Residual
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapter_rank, zero_factors
from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.rewrite import adapted, traced_source
from floorplan.methods.subject import Source, Subject, subject_of

X = torch.randn(2, 3, 12, 12)
PLAN = Plan("memflora", Options(2, "all"))


def subject(model: nn.Module, x: Tensor = X) -> Subject:
    return subject_of(Source(model, x))


@pytest.mark.parametrize("verified", [True, False])
def test_a_copy_is_rewritten_and_starts_as_the_model(verified: bool) -> None:
    model = Residual().eval()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    traced, log = adapted(subject(model), PLAN, verified)
    assert adapter_rank(traced.gm) == 2 and adapter_rank(model) is None and traced.gm.training
    assert list(log) == [p.name for p in _passes()] and all(not p.any() for p in zero_factors(traced.gm).values())
    torch.testing.assert_close(traced.gm.eval()(X), model(X), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


def _passes() -> Any:
    from floorplan.methods.catalogue import method

    return method("memflora").passes(PLAN.options)


def test_convs_on_one_weight_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    model[1].weight = model[0].weight
    traced, _ = adapted(subject(model, torch.randn(2, 4, 5, 5)), PLAN, False)
    assert "0, 1 share one weight; each gets an adapter of its own" in traced.notes


def already() -> nn.Module:
    return adapted(subject(Residual()), PLAN, False)[0].gm


def broken() -> nn.Module:
    model = Residual()
    model.fc.weight.data[0, 0] = float("nan")
    return model


class Other(nn.Module):
    """Takes another branch when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return torch.tanh(y) if isinstance(x, fx.Proxy) else y


@pytest.mark.parametrize(
    "make,why",
    [
        (already, "already adapted; rewrite its source model instead"),
        (broken, "fc.weight holds NaN or infinity, so nothing can be verified; repair it first"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1)).requires_grad_(False), None),
        (Other, "forward takes another branch when it is traced than when it runs"),
        (
            lambda: Lambda(lambda m, x: m.fc(x), fc=nn.Linear(12, 2)),
            r"no conv was adapted .*its graph has no conv layer",
        ),
    ],
)
def test_refusals(make: Callable[[], nn.Module], why: str | None) -> None:
    s = subject(make())
    if why is None:  # frozen or not is the method's choice
        assert adapter_rank(adapted(s, PLAN, True)[0].gm) == 2
        return
    with pytest.raises(FloorplanError, match=f"^{s.name}: {why}"):
        adapted(s, PLAN, True)


def test_a_branch_that_tracing_changes_is_no_source() -> None:
    with pytest.raises(FloorplanError, match="decide by isinstance, hasattr or try outside the forward"):
        traced_source(subject(Other()))
