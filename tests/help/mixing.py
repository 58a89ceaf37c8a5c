"""Random nets whose samples touch, or do not: for steps in parts, which are exact or refused."""

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from steps import graph_of
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.losses import Named, Shared, as_loss
from floorplan.step.compile import Schedule, Step, compile_step
from floorplan.step.studied import crossings, ordered
from floorplan.step.timeline import predict
from floorplan.torch_doors import TorchDispatchMode, storage_key, tensors_in

Change = Callable[[Any, Tensor], Tensor]  # (the net, a map (B, C, H, W)) -> a map of that shape


def _norm(n: Any, y: Tensor) -> Tensor:
    return F.batch_norm(y, None, None, n.gain, n.shift, True)


def _closed(n: Any, y: Tensor) -> Tensor:
    return y + n.zero(y - y.mean(0, keepdim=True))


def _attended(y: Tensor) -> Tensor:
    a = torch.bmm(y.flatten(2), y.flatten(2).transpose(1, 2)).softmax(-1)
    return y + 0.2 * a.mean(2)[..., None, None]


TOUCH: dict[str, Change] = {
    "norm": _norm,
    "closed": _closed,
    "mean": lambda n, y: y - y.mean((0, 2, 3), keepdim=True) * n.gate,
    "sort": lambda n, y: y + 0.1 * y.sort(0).values,
    "roll": lambda n, y: y + 0.3 * y.roll(1, 0),
    "flip": lambda n, y: y + 0.3 * torch.flip(y, (0,)),
    "index": lambda n, y: y + 0.3 * y[torch.arange(y.shape[0]) - 1],
    "gather": lambda n, y: y + 0.2 * y.gather(0, y.sort(0).indices),
    "cumsum": lambda n, y: y + 0.1 * y.cumsum(0),
    "softmax": lambda n, y: y * torch.softmax(y, 0),
    "product": lambda n, y: y + (y.flatten(1) @ y.flatten(1).t()).tanh().mean(1)[:, None, None, None],
    "mixed": lambda n, y: y + 0.2 * y.permute(1, 0, 2, 3).reshape(y.shape),
    "count": lambda n, y: y * (1 + y.shape[0] / 10),
    "place": lambda n, y: y + torch.linspace(0, 1, y.shape[0], dtype=y.dtype)[:, None, None, None],
    "first": lambda n, y: y + 0.2 * y[:1],
    "largest": lambda n, y: y / (y.abs().max() + 1),
}

APART: dict[str, Change] = {
    "none": lambda n, y: y,
    "group norm": lambda n, y: F.group_norm(y, 2, n.gain, n.shift),
    "instance norm": lambda n, y: F.instance_norm(y),
    "layer norm": lambda n, y: F.layer_norm(y, y.shape[1:]),
    "gate": lambda n, y: y * n.zero(y.mean((2, 3), keepdim=True)).sigmoid(),
    "attention": lambda n, y: _attended(y),
    "shuffle": lambda n, y: y.view(y.shape[0], 2, -1, *y.shape[2:]).transpose(1, 2).reshape(y.shape),
    "sort": lambda n, y: y.flatten(2).sort(-1).values.view(y.shape),
    "silu": lambda n, y: F.silu(y),
    "cat": lambda n, y: torch.cat([y[:, 1:], y[:, :1]], 1),
    "merged": lambda n, y: F.avg_pool2d(y.reshape(-1, 1, *y.shape[2:]), 3, 1, 1).reshape(y.shape),
    "own place": lambda n, y: y * y[torch.arange(y.shape[0]), 0][:, None].sigmoid(),
}


class Mixing(nn.Module):
    """Convs with changes between them, and a head: a classifier, or a map."""

    def __init__(self, changes: list[Change], dense: bool, classes: int) -> None:
        super().__init__()
        self.changes, self.dense = changes, dense
        self.convs = nn.ModuleList(nn.Conv2d(3 if k == 0 else 4, 4, 3, padding=1) for k in range(len(changes)))
        self.zero, self.gate = nn.Conv2d(4, 4, 1), nn.Parameter(torch.zeros(1))
        self.gain, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.zeros(4))
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)  # type: ignore[arg-type]
        self.out = nn.Conv2d(4, classes, 1)

    def forward(self, x: Tensor) -> Any:
        for conv, change in zip(self.convs, self.changes, strict=True):
            x = change(self, torch.relu(conv(x)))
        y = self.out(x)
        return y if self.dense else y.mean((2, 3))


def drawn(choose: random.Random) -> tuple[Mixing, bool]:
    """A net, and whether its samples touch."""
    changes = [choose.choice(list(APART.values())) for _ in range(choose.randint(1, 3))]
    touch = choose.random() < 0.4
    if touch:
        changes[choose.randrange(len(changes))] = choose.choice(list(TOUCH.values()))
    torch.manual_seed(choose.randrange(1 << 30))
    return Mixing(changes, choose.random() < 0.5, 5).double().train(choose.random() < 0.7), touch


def schedule(gm: Any, choose: random.Random, batch: int) -> Schedule:
    """Micro-batches, a stage, or both, so that the loss sees parts."""
    nodes = ordered(gm)
    sites = [k for k, n in enumerate(nodes) if n.op == "call_module" and "convs" in str(n.target)]
    cuts = [n.name for n, _ in crossings(nodes) if sites[0] <= nodes.index(n) < sites[-1]]
    micro = choose.choice([0, 1, 2, 3, batch - 1])
    if choose.random() < 0.5 or not cuts:
        return Schedule(micro_batch=micro or 2)
    return Schedule(micro, ((choose.choice(cuts), choose.choice([1, 2])),), choose.choice([0, 1, 3]))


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Most bytes of storages that ops made and that live: a count of its own, by weak references alone."""

    def __init__(self, apart: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = {storage_key(t) for t in apart}
        self.live = self.peak = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        for t in tensors_in(out):
            s, key = t.untyped_storage(), storage_key(t)
            if key not in self.seen and s.nbytes():
                self.seen.add(key)
                self.live += s.nbytes()
                weakref.finalize(s, self._gone, key, s.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _gone(self, key: int, n: int) -> None:
        self.seen.discard(key)
        self.live -= n


def counted(step: Step, x: Tensor, y: Tensor) -> tuple[int, Tensor]:
    """The peak of one call, and its loss."""
    model = step.module
    own = step.loss.weights if isinstance(step.loss, Named) else []
    with Peak([*model.parameters(), *model.buffers(), *own, x, y]) as watch:
        value = step(x, y)
    return watch.peak, value


@dataclass(frozen=True)
class Tried:
    """One net, loss and schedule.

    kind: exact, with a relative error of loss and gradients ≤ 1e-10; refused, in one line; else wrong.
    """

    kind: str
    touch: bool  # whether samples touch
    words: str
    error: float = 0.0
    predicted: int = 0  # peak of a call, bytes
    allocated: int = 0  # the same, counted


def tried(seed: int, losses: Callable[[tuple[int, ...]], list[Any]]) -> Tried:
    """A net, a loss and a schedule by chance, against autograd on the whole batch."""
    choose = random.Random(seed)
    net, touch = drawn(choose)
    batch = choose.choice([4, 5, 7])
    x = (
        torch.randn(batch, 3, 6, 6, dtype=torch.float64)
        * torch.linspace(0.2, 3, batch, dtype=torch.float64)[:, None, None, None]
    )
    gm = graph_of(net, x).train(net.training)
    shape = tuple(net(x).shape)
    loss, target = choose.choice(losses(shape))
    y, plan = target(), schedule(gm, choose, batch)
    what = f"{getattr(loss, '__name__', getattr(loss, 'name', loss))}, {plan}"
    value = Shared(as_loss(loss), None, batch).whole(gm(x), y)
    trained = [p for p in gm.parameters() if p.requires_grad]
    want = torch.autograd.grad(value, trained, allow_unused=True)
    try:
        step = compile_step(gm, loss, x, plan=plan)
        said = predict(step, (x,), y).peak
        took, got = counted(step, x, y)
    except FloorplanError as e:
        assert "\n" not in str(e)
        return Tried("refused", touch, str(e))
    top = max((float(g.abs().max()) for g in want if g is not None), default=0.0)
    top = max(top, 1e-6 * abs(float(value)))  # gradients that are zero but for rounding have no scale
    error = abs(float(got - value)) / max(abs(float(value)), 1e-12)
    for p, g in zip(trained, want, strict=True):
        have = torch.zeros_like(p) if p.grad is None else p.grad
        error = max(error, float((have - (0 if g is None else g)).abs().max()) / top)
    return Tried("exact" if error <= 1e-10 else "wrong", touch, what, error, said, took)
