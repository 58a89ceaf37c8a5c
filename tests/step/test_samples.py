"""Whether samples touch: nets that mix them are refused by node, in the mode that trains; others are taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import graph_of
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.trace import trace
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.samples import batched, refuse_coupled

X = torch.randn(4, 3, 8, 8)


class Net(nn.Module):
    """A conv, features of it changed by `change`, a head; with what a change may need."""

    def __init__(self, change: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.gate, self.zero = nn.Parameter(torch.zeros(1)), nn.Linear(8, 8)
        nn.init.zeros_(self.zero.weight)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.randn(4, 8))
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.change(self, torch.relu(self.conv(x)).mean((2, 3))))


def made(change: Any, train: bool = True) -> fx.GraphModule:
    torch.manual_seed(0)
    return trace(Net(change).train(train), (X,)).gm.train(train)


def _stored(net: Any, y: Tensor) -> Tensor:
    net.mean.mul_(0.9)
    return y


def _halves(y: Tensor) -> Tensor:
    a, b = y.chunk(2)
    return torch.cat([b, a])


TOUCH: dict[str, tuple[Any, str]] = {
    "mean": (lambda n, y: y - y.mean(0), "mean over the samples"),
    "closed gate": (lambda n, y: y + n.gate * y.mean(0, keepdim=True), "mean over the samples"),
    "zero weight": (lambda n, y: y + n.zero(y - y.amax(0)), "amax over the samples"),
    "train alone": (lambda n, y: y - y.mean(0) if n.training else y, "mean over the samples"),
    "batch norm": (lambda n, y: F.batch_norm(y, None, None, training=True), "normali"),
    "sorted": (lambda n, y: y.sort(0).values, "sort over the samples"),
    "rolled": (lambda n, y: y + y.roll(1, 0), "roll over the samples"),
    "flipped": (lambda n, y: y + y.flip(0), "flip over the samples"),
    "summed up": (lambda n, y: y.cumsum(0), "cumsum over the samples"),
    "softmax": (lambda n, y: y * y.softmax(0), "softmax over the samples"),
    "similar": (lambda n, y: y + (y @ y.t()).softmax(1) @ y, "another size than samples|takes samples together"),
    "first": (lambda n, y: y + 0.5 * y[:1], "slice over the samples"),
    "one": (lambda n, y: y + y[0], "select over the samples"),
    "reshaped": (lambda n, y: y.reshape(8, -1).t(), "mixes samples|another size"),
    "norm": (lambda n, y: y / y.norm(), "norm over the samples"),
    "count": (lambda n, y: y / y.shape[0], "computes with the number of samples"),
    "inverse count": (lambda n, y: y * (1 / len(y.shape) / y.size(0)), "computes with the number of samples"),
    "shuffled": (lambda n, y: y[torch.randperm(y.shape[0])], "numbers the samples"),
    "numbered": (lambda n, y: y + torch.arange(y.shape[0])[:, None] * 0.1, "depends on the other samples"),
    "gathered": (lambda n, y: y.gather(0, y.argsort(0)), "argsort|sort over the samples"),
    "stored": (_stored, "writes to mean"),
    "halves": (lambda n, y: _halves(y), "takes other steps|another size|does not take another batch"),
    "distances": (lambda n, y: y * torch.cdist(y, y).sum(1, keepdim=True), "touch|together|size|depends|samples"),
    "attention": (lambda n, y: n.attention(y[:, None], y[:, None], y[:, None])[0][:, 0], "samples"),
    "standard": (lambda n, y: (y - y.mean()) / y.std(), "mean over the samples"),
    "einsum": (lambda n, y: torch.einsum("bc,dc->bd", y, y) @ y, "samples|size"),
    "best": (lambda n, y: y * (y == y.max(0).values), "max over the samples"),
    "layer norm": (lambda n, y: F.layer_norm(y.t(), (y.shape[0],)).t(), "samples"),
}


@pytest.mark.parametrize("name", TOUCH)
def test_samples_that_touch_are_refused_by_name(name: str) -> None:
    change, words = TOUCH[name]
    with pytest.raises(FloorplanError, match=f"^schedule: .*({words})") as e:
        refuse_coupled(made(change), (X,))
    assert "\n" not in str(e.value) and str(e.value).endswith("use the whole batch")


APART: dict[str, Any] = {
    "softmax": lambda n, y: y * y.softmax(-1),
    "attention": lambda n, y: F.scaled_dot_product_attention(*[y.view(y.shape[0], 2, 2, 2)] * 3).flatten(1),
    "layer norm": lambda n, y: F.layer_norm(y, (8,)),
    "group norm": lambda n, y: F.group_norm(y[:, :, None], 2)[..., 0],
    "instance norm": lambda n, y: F.instance_norm(y.view(-1, 2, 2, 2)).flatten(1),
    "dropout": lambda n, y: F.dropout(y, 0.5, n.training),
    "drop path": lambda n, y: y * y.new_empty((y.shape[0], 1)).bernoulli_(0.8),
    "noise": lambda n, y: y + torch.randn_like(y),
    "own place": lambda n, y: y * y[torch.arange(y.shape[0]), 0][:, None],
    "lookup": lambda n, y: y + n.table[y.argmax(1) // 2],
    "gathered": lambda n, y: y.gather(1, y.argsort(1)),
    "heads": lambda n, y: torch.bmm(y.view(-1, 4, 2), y.view(-1, 2, 4)).flatten(1)[:, :8],
    "merged heads": lambda n, y: (y.reshape(-1, 2).softmax(1)).reshape(y.shape[0], 8),
    "expanded": lambda n, y: torch.cat([n.table[:1, :1].expand(y.shape[0], 1), y[:, 1:]], 1),
    "time first": lambda n, y: y.t().cumsum(0).t(),
    "masked": lambda n, y: y.masked_fill(y > 0.3, 0) + torch.where(y > 0, y, y * 2),
    "dynamic conv": lambda n, y: F.conv1d(
        y.reshape(1, -1, 4), y[:, :2].reshape(-1, 1, 1), groups=2 * y.shape[0]
    ).reshape(y.shape[0], 8),
    "inverse": lambda n, y: torch.linalg.inv(torch.diag_embed(y.abs() + 1)).sum(1),
    "normed": lambda n, y: F.normalize(y, dim=1),
    "top": lambda n, y: y * (y >= y.topk(3, 1).values[:, -1:]),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", APART)
def test_samples_apart_are_taken(name: str, train: bool) -> None:
    refuse_coupled(made(APART[name], train), (X,))


def test_the_mode_that_trains_counts() -> None:
    gm = trace(Net(TOUCH["train alone"][0]), (X,), both_modes=True).gm
    step = compile_step(gm.eval(), "cross_entropy", X, plan=Schedule(micro_batch=2))
    step(X, torch.arange(4))
    gm.train()
    if any(n.target is torch.mean or n.target == "mean" for n in gm.graph.nodes if (0,) == n.args[1:]):
        with pytest.raises(FloorplanError, match="mean over the samples"):
            step(X, torch.arange(4))


def test_the_line_of_the_source_is_named() -> None:
    gm = made(TOUCH["rolled"][0])
    with pytest.raises(FloorplanError, match=r"^schedule: roll \(.*test_samples.py:\d+\): roll over the samples"):
        refuse_coupled(gm, (X,))


def test_outputs_have_the_samples_in_front() -> None:
    class Sideways(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).t()

    with pytest.raises(FloorplanError, match=r"output \[5, 'B'\] does not have the samples in front"):
        refuse_coupled(trace(Sideways(lambda n, y: y), (X,)).gm, (X,))


def test_rows_of_inputs() -> None:
    assert batched(({"a": X, "b": torch.ones(4)}, torch.ones(3), torch.ones(()))) == [True, True, False, False]


class WithTable(nn.Module):
    """An input that is the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).mean((2, 3)) @ table.t()


def test_an_input_without_samples_is_not_taken_apart() -> None:
    x, table = torch.randn(6, 3, 8, 8), torch.randn(4, 8)
    gm = graph_of(WithTable(), (x, table))
    step = compile_step(gm, "cross_entropy", (x, table), plan=Schedule(micro_batch=4))
    with pytest.raises(FloorplanError, match="tensor 1 of the inputs has as many rows as 4 samples"):
        step(x, table, torch.arange(6) % 4)
    step = compile_step(gm, "cross_entropy", (x, table), plan=Schedule(micro_batch=3))
    step(x, table, torch.arange(6) % 4)
    with pytest.raises(FloorplanError, match="tensor 1 of the inputs has as many rows"):
        step(x[:4], table, torch.arange(4))
