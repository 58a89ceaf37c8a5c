"""Documents of an adapted.pt, to be damaged: small nets, one call of a target, how it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from floorplan.errors import LoadError
from floorplan.store.artifact import decode, encode, load_artifact, save_artifact


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.skip = nn.Conv2d(3, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += self.skip(x)
        return F.relu6(y, inplace=True)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.first
        self.other = nn.Conv2d(3, 3, 3, padding=1)
        self.other.weight = self.first.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.again(self.first(x)))
        return F.conv2d(y, self.again.weight, padding=1)


class Methods(nn.Module):
    def forward(self, x: Tensor, gain: float = 2.0, *, flip: bool = False) -> Tensor:
        y = x.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, x.shape[1])
        y = y[:, 1:-1:2, ..., None].squeeze(-1)[:, :, (0, 2)].mul_(gain)
        y = y.to(torch.float64).clamp(min=-float("inf"), max=float("inf")).sum(-1, dtype=x.dtype)
        z = torch.zeros(y.shape, dtype=torch.float32, device=x.device) + y.new_ones(1)
        return -(y @ z.transpose(0, 1)).contiguous(memory_format=torch.contiguous_format) / 3


NETS: dict[str, type[nn.Module]] = {"residual": Residual, "shared": Shared, "methods": Methods}


def document(name: str = "residual") -> dict[str, Any]:
    return encode(fx.symbolic_trace(NETS[name]()))


def call(target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    """A document whose graph makes one call."""
    d = document()
    d["graph"] = [
        {"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}},
        {"op": op, "name": "y", "target": target, "args": list(args), "kwargs": kwargs},
        {"op": "output", "name": "output", "target": "output", "args": [{"node": "y"}], "kwargs": {}},
    ]
    return d


X = {"node": "x"}


def conv_record(d: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in d["modules"] if m["path"] == "skip")
    return found


def refused(d: Any, where: str = "") -> None:
    with pytest.raises(LoadError) as e:
        decode(d)
    text = str(e.value)
    assert "\n" not in text and len(text) < 400
    assert where in text


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 3, padding="same"), kind

    def forward(self, x: Tensor) -> Any:
        p, q = self.a(x), torch.cat([self.b(x), x], dim=1)
        return {"tuple": (p, [q, (p,)]), "dict": {"p": p, "q": (q, None)}, "list": [p, q]}[self.kind]


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, 2.0, 0.5]).reshape(3, 1, 1))
        self.register_buffer("shift", torch.ones(3, 1, 1), persistent=False)
        self.register_buffer("kept", torch.full((1,), 0.25))
        self.bare = torch.tensor(0.125)

    def forward(self, x: Tensor) -> Tensor:
        shift, kept = self.get_buffer("shift"), self.get_buffer("kept")
        return x * self.scale + shift - kept + self.bare


class Functions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.pad(F.max_pool2d(F.silu(x), 2), (0, 1, 1, 0), value=0.5)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        z = torch.softmax(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1), dim=1, dtype=torch.float64)
        v = torch.einsum("bc,bd->cd", z, z).abs() ** 0.5
        low, high = torch.chunk(F.hardswish(x), 2, dim=2)
        return (torch.stack([v, v]), low * high, F.leaky_relu(x, 0.2), F.dropout(x, 0.0, self.training))


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm2d(3)
        self.live = nn.BatchNorm2d(3, momentum=None)
        self.act = nn.PReLU(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.live(self.frozen(x)))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
        self.norm = nn.LayerNorm([8], bias=False)
        self.head = nn.Sequential(nn.GroupNorm(2, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x.flatten(2).transpose(1, 2))[0]
        y = self.norm(self.attention(y, y, y)[0] + y)
        z: Tensor = self.head(y.mean(1))
        return z


ZOO: dict[str, Any] = {
    "residual": Residual,
    "tuple": lambda: Outputs("tuple"),
    "dict": lambda: Outputs("dict"),
    "list": lambda: Outputs("list"),
    "shared": Shared,
    "constants": Constants,
    "methods": Methods,
    "functions": Functions,
    "modes": Modes,
    "recurrent": Recurrent,
}


def image(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def traced(name: str) -> fx.GraphModule:
    torch.manual_seed(0)
    gm = fx.symbolic_trace(ZOO[name]())
    for node in gm.graph.nodes:
        node.type = None  # annotations are not stored
    gm.recompile()
    if name == "modes":
        gm.get_submodule("frozen").eval()
        gm.get_parameter("frozen.weight").requires_grad_(False)
    return gm


def round_trip(gm: fx.GraphModule, folder: Path, meta: dict[str, Any] | None = None) -> Any:
    save_artifact(gm, folder / "adapted.pt", meta or {})
    return load_artifact(folder / "adapted.pt")


def flat(out: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]


def step(gm: fx.GraphModule) -> tuple[Any, dict[str, Tensor | None], Tensor]:
    """One training step: outputs, parameter gradients, input gradient."""
    x = image().requires_grad_()
    gm.zero_grad(set_to_none=True)
    out = gm(x)
    torch.stack([t.double().square().sum() for t in flat(out)]).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return out, {n: p.grad for n, p in gm.named_parameters()}, x.grad


def same(a: Any, b: Any) -> None:
    """Equal structure (types and keys) and equal bits."""
    assert torch.utils._pytree.tree_structure(a) == torch.utils._pytree.tree_structure(b)
    for s, t in zip(flat(a), flat(b), strict=True):
        assert s.dtype == t.dtype and torch.equal(s, t)


def with_leaf(module: nn.Module) -> fx.GraphModule:
    """A graph that calls one module, `leaf`."""
    graph = fx.Graph()
    graph.output(graph.call_module("leaf", (graph.placeholder("x"),)))
    return fx.GraphModule({"leaf": module}, graph)
