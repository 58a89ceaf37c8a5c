"""No rule lets an op pass in which samples touch: a call is accepted only if each sample alone gives the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from traced_nets import Net

from floorplan.errors import FloorplanError
from floorplan.graph.trace import trace
from floorplan.step.sample_rules import Op, Value, rule_of
from floorplan.step.samples import SIZES, refuse_coupled, touching

X = torch.randn(4, 5, 6, dtype=torch.float64)
Call = Callable[[Tensor], Tensor]


def along(d: int) -> dict[str, Call]:
    """Calls along one dimension."""
    return {
        "sum": lambda x: x + x.sum(d, keepdim=True),
        "amax": lambda x: x - x.amax(d, keepdim=True),
        "softmax": lambda x: x.softmax(d),
        "log_softmax": lambda x: F.log_softmax(x, d),
        "cumsum": lambda x: x.cumsum(d),
        "sort": lambda x: x.sort(d).values,
        "argsort": lambda x: x.argsort(d).double(),
        "topk": lambda x: x.topk(1, d).values,
        "flip": lambda x: x.flip(d),
        "roll": lambda x: x.roll(1, d),
        "gather": lambda x: x.gather(d, x.argsort(d)),
        "index_select": lambda x: x.index_select(d, torch.tensor([0, 1])),
        "select": lambda x: x + x.select(d, 0).unsqueeze(d),
        "narrow": lambda x: x.narrow(d, 0, 2),
        "chunk": lambda x: torch.cat([*x.chunk(2, d)][::-1], d),
        "unbind": lambda x: torch.stack(x.unbind(d)[::-1], d),
        "norm": lambda x: x / x.norm(dim=d, keepdim=True),
        "cat": lambda x: torch.cat([x, x * 2], d),
        "std": lambda x: x / x.std(d, keepdim=True),
        "squeezed": lambda x: x.mean(d, keepdim=True).squeeze(d)[..., None],
        "flattened": lambda x: x.transpose(0, d).flatten(0, 1),
        "pooled": lambda x: F.avg_pool1d(x.transpose(d, -1), 2, stride=1, padding=1),
        "glu": lambda x: F.glu(torch.cat([x, x], d), d),
        "scattered": lambda x: x.scatter(d, x.argsort(d), x),
        "unfolded": lambda x: x.unfold(d, 2, 1).sum(-1),
    }


OTHERS: dict[str, Call] = {
    "view and back": lambda x: x.reshape(-1, 6).softmax(-1).reshape(-1, 5, 6),
    "view across": lambda x: x.reshape(5, -1, 6).transpose(0, 1),
    "transposed view": lambda x: x.transpose(0, 1).reshape(-1, 5, 6),
    "own product": lambda x: x @ x.transpose(1, 2),
    "product across": lambda x: x.transpose(0, 2) @ x.transpose(0, 2).transpose(1, 2),
    "rows": lambda x: x.flatten(1) @ torch.ones(30, 3, dtype=torch.float64),
    "gram": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "einsum across": lambda x: torch.einsum("bij,ckj->bik", x, x),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "layer norm of all": lambda x: F.layer_norm(x.permute(1, 0, 2).flatten(1), (x.shape[0] * 6,)).reshape(5, -1, 6),
    "instance norm": lambda x: F.instance_norm(x),
    "instance norm of positions": lambda x: F.instance_norm(x.permute(1, 2, 0)).permute(2, 0, 1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 5),
    "conv": lambda x: F.conv1d(x, torch.ones(2, 5, 3, dtype=torch.float64)),
    "conv over samples": lambda x: F.conv1d(x.permute(1, 2, 0), torch.ones(6, 6, 1, dtype=torch.float64)).permute(
        2, 0, 1
    ),
    "conv along samples": lambda x: F.conv1d(
        x.permute(1, 2, 0), torch.ones(6, 6, 3, dtype=torch.float64), padding=1
    ).permute(2, 0, 1),
    "padded": lambda x: F.pad(x, (1, 1)),
    "padded with a sample": lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)),
    "resized": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"),
    "resized samples": lambda x: F.interpolate(x.permute(1, 2, 0), scale_factor=2.0, mode="linear").permute(2, 0, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention of samples": lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1),
    "own rows": lambda x: x[torch.arange(x.shape[0]), 0][:, None] * x,
    "other rows": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "distances": lambda x: torch.cdist(x, x),
    "distances of samples": lambda x: torch.cdist(x.flatten(1), x.flatten(1)),
    "triangle": lambda x: x.tril(),
    "triangle of samples": lambda x: x.permute(1, 0, 2).tril().permute(1, 0, 2),
    "outer": lambda x: x.flatten(1)[:, None] * x.flatten(1)[None],
    "spectrum": lambda x: torch.fft.fft(x, dim=1).abs(),
    "spectrum of samples": lambda x: torch.fft.fft(x, dim=0).abs(),
    "addmm": lambda x: torch.addmm(x[:, 0], x[:, 1], torch.eye(6, dtype=torch.float64)),
    "addmm of samples": lambda x: torch.addmm(x[0, :1, :1], x[:, 1], x[:6, 1].t() @ x[:6, 1]),
}


def calls() -> Iterator[tuple[str, Call]]:
    for d in (0, 1, 2, -1, -3):
        yield from ((f"{name} along {d}", call) for name, call in along(d).items())
    yield from OTHERS.items()


def accepted(call: Call) -> tuple[bool, Any]:
    gm = trace(Net(lambda s, x: call(x)), [X]).gm
    try:
        refuse_coupled(gm, (X,))
    except FloorplanError as e:
        assert str(e).endswith("use the whole batch"), e
        return False, gm
    return True, gm


@pytest.mark.parametrize(("name", "call"), list(calls()), ids=[n for n, _ in calls()])
def test_what_is_accepted_gives_every_sample_its_own(name: str, call: Call) -> None:
    taken, gm = accepted(call)
    if taken:
        alone = torch.cat([gm(X[i : i + 1]) for i in range(4)])
        assert torch.allclose(gm(X), alone, rtol=1e-10, atol=1e-12)
    if name.split(" along ")[-1] in ("0", "-3") or " of samples" in name or "across" in name:
        assert not taken


def test_most_that_is_apart_is_accepted() -> None:
    apart = [call for d in (1, 2, -1) for call in along(d).values()]
    assert sum(accepted(call)[0] for call in apart) >= 0.9 * len(apart)


def op(name: str, pointwise: bool = False) -> Op:
    return Op(name, "here", {}, [], pointwise, "")


def test_an_op_has_the_rule_of_its_name() -> None:
    assert rule_of(op("mul", True)) is rule_of(op("clone")) is not None
    assert rule_of(op("index_fill_")) is rule_of(op("softmax")) is not None
    assert rule_of(op("an_op_of_tomorrow")) is None


def test_an_op_without_a_rule_is_not_sure() -> None:
    low, high = ([Value((n, 3))] for n in SIZES)
    a = Op("an_op_of_tomorrow", "here", {"x": low[0]}, low, False, "")
    b = Op("an_op_of_tomorrow", "here", {"x": high[0]}, high, False, "")
    assert touching(a, b) == ("an_op_of_tomorrow has no rule", False)
