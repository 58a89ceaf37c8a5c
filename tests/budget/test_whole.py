"""Losses that see a whole batch: what they take between two passes, and peaks of such steps to the byte."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import contrastive, dice
from plans import MACHINES
from small import Residual
from steps import graph_of
from torch import Tensor, nn

from floorplan.budget.clock import Clock
from floorplan.budget.net import Costed, Net
from floorplan.budget.search import exact
from floorplan.cost_models.peaks import Span
from floorplan.errors import FloorplanError
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import loss
from floorplan.step.studied import studied
from floorplan.step.timeline import measure

X = torch.randn(2, 3, 16, 16)


class Two(Residual):
    """Two outputs of one map."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(F.relu(self.bn(self.stem(x))))
        x = F.relu(self.bn1(self.conv(x)) + self.proj(x)).mean((2, 3))
        return self.fc(x), self.other(x)


class Maps(nn.Module):
    """A class for every place: nothing follows the last site, whose gradient is the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Centres(nn.Module):
    """A loss that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 5))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(out, self.centres).square().softmax(0)[torch.arange(len(y)), y].sum()


def of_both(out: Any, y: Any) -> Tensor:
    """Of two outputs, by a target in a nest."""
    return contrastive(out[0], y["class"]) + out[1].square().mean() / (out[0].var() + 1)


CLASSES, PLACES = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 16, 16, dtype=torch.int64)
KINDS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "contrastive": (Residual, contrastive, CLASSES),
    "dice": (Maps, dice, PLACES),
    "two": (Two, of_both, {"class": CLASSES}),
    "trains": (Residual, Centres(), CLASSES),
    "weighed": (Residual, loss("bce_with_logits", weight=torch.rand(5)), torch.zeros(2, 5)),
}


@cache
def net_of(kind: str) -> Net:
    make, run, target = KINDS[kind]
    torch.manual_seed(0)
    gm = graph_of(make().eval(), X, 2, "auto")
    return Net(studied(gm, (X,)), target, run, Clock(MACHINES))


def drawn(net: Net, choose: random.Random) -> Costed:
    """A cut where it may be, parts that need not divide the batch, sites in their merged form."""
    last, batch = len(net.groups) - 1, choose.choice([13, 16])
    forms = (0,) * len(net.groups)
    where = choose.choice([[], [choose.randrange(last)]])
    edges = [-1, *where, last]
    spans = [Span(a + 1, b, choose.choice([0, 2, 5, 8]), forms) for a, b in zip(edges, edges[1:], strict=False)]
    return net.costed(batch, choose.choice([0, 2, 4, 9]), spans)


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_of_two_passes_are_exact(kind: str) -> None:
    net, choose = net_of(kind), random.Random(1)
    found = [drawn(net, choose) for _ in range(5)]
    assert any(map(net.twice, found))
    for f in found:
        step, line = exact(net, f)
        given = filled([*net.inputs, net.target], f.batch)
        assert f.peak == line.peak == measure(step, given[:-1], given[-1]).peak, (f.batch, f.micro, f.stages)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_batch_before_the_loss_is_one_pass(kind: str) -> None:
    net = net_of(kind)
    forms, last = (0,) * len(net.groups), len(net.groups) - 1
    cut = net.costed(13, 0, [Span(0, 0, 2, forms), Span(1, last, 0, forms)])
    whole, parts = (net.costed(13, m, [Span(0, last, 0, forms)]) for m in (0, 5))
    assert [net.twice(f) for f in (whole, cut, parts)] == [False, False, True]
    for f in (whole, cut):
        assert f.peak == exact(net, f)[1].peak
    assert net.work_of(parts).macs > 1.2 * net.work_of(whole).macs and parts.seconds > whole.seconds


def test_the_loss_of_all_pairs_grows_with_their_number() -> None:
    whole = net_of("contrastive").whole
    assert whole is not None
    (few, _), (many, work) = whole.at(8), whole.at(64)
    assert few.outputs == 8 * 5 * 4 and few.held == few.outputs + 4  # the gradient, and the value
    assert many.most > 64 * 64 * 4 > 8 * few.most / 4 and work.by_kind
    assert [t.shape for t in whole.seeds][0][1:] == (5,)


def test_a_loss_that_trains_is_left_as_it_was() -> None:
    own = net_of("trains").loss
    assert isinstance(own, Centres) and own.centres.grad is None


def test_losses_that_a_plan_cannot_see_are_refused_by_name() -> None:
    make, _, y = KINDS["contrastive"]
    s = studied(graph_of(make().eval(), X, 2, "auto"), (X,))

    def masked(out: Tensor, y: Tensor) -> Tensor:
        return out[y > 0].sum()

    with pytest.raises(FloorplanError, match="loss masked: fails on outputs of 8 samples: reads values"):
        Net(s, y, masked, Clock(MACHINES))
    with pytest.raises(FloorplanError, match="loss bce_with_logits.*: fails on outputs of 8 samples"):
        Net(s, torch.zeros(2, 5), loss("bce_with_logits", weight=torch.rand(2, 1)), Clock(MACHINES))
