"""The modules that random specs describe: every spelling of each op, as users write them."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Spec = dict[str, Any]
HINGE = (-0.5, 0.75)  # narrow, so that both sides of a Hardtanh are reached
MODULES: dict[str, Callable[..., nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda **k: nn.Hardtanh(*HINGE, **k),
    "LeakyReLU": lambda **k: nn.LeakyReLU(0.2, **k),
    "Hardsigmoid": nn.Hardsigmoid,
    "Threshold": lambda **k: nn.Threshold(0.1, -0.3, **k),
    "SiLU": nn.SiLU,
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
}
FUNCTIONS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("ReLU", "function"): F.relu,
    ("ReLU", "function_"): lambda x: F.relu(x, inplace=True),
    ("ReLU", "torch"): torch.relu,
    ("ReLU", "torch_"): torch.relu_,
    ("ReLU", "method"): lambda x: x.relu(),
    ("ReLU", "method_"): lambda x: x.relu_(),
    ("ReLU6", "function"): F.relu6,
    ("ReLU6", "clamp"): lambda x: x.clamp(0.0, 6.0),
    ("Hardtanh", "function"): lambda x: F.hardtanh(x, *HINGE),
    ("Hardtanh", "clamp"): lambda x: torch.clamp(x, min=HINGE[0], max=HINGE[1]),
    ("LeakyReLU", "function"): lambda x: F.leaky_relu(x, 0.2),
    ("LeakyReLU", "function_"): lambda x: F.leaky_relu(x, 0.2, True),
    ("Hardsigmoid", "function"): F.hardsigmoid,
    ("Threshold", "function"): lambda x: F.threshold(x, 0.1, -0.3),
    ("SiLU", "function"): F.silu,
    ("Tanh", "torch"): torch.tanh,
    ("Tanh", "method"): lambda x: x.tanh(),
    ("Sigmoid", "torch"): torch.sigmoid,
    ("Sigmoid", "method"): lambda x: x.sigmoid(),
    ("Sigmoid", "method_"): lambda x: x.sigmoid_(),
}


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a+b": operator.add,
    "b+a": lambda a, b: b + a,
    "a+=b": operator.iadd,
    "add": torch.add,
    "add_": lambda a, b: a.add_(b),
    "alpha": lambda a, b: torch.add(a, b, alpha=0.5),
    "sub": operator.sub,
}


class Activation(nn.Module):
    """A functional spelling."""

    def __init__(self, name: str, style: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[name, style]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Padded(nn.Module):
    """F.pad before a convolution."""

    def __init__(self, conv: nn.Module, spec: Spec) -> None:
        super().__init__()
        self.conv, self.spec = conv, spec

    def forward(self, x: Tensor) -> Tensor:
        s = self.spec
        options = {"value": s["value"]} if s["pad_mode"] == "constant" else {"mode": s["pad_mode"]}
        return self.conv(F.pad(x, s["pad"], **options))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """body(x) and x (or its projection), added in one of many spellings."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.body = sequence(spec["body"])
        self.project = None if spec["project"] is None else sequence(spec["project"])
        self.how = spec["how"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        skip = x if self.project is None else self.project(x)
        return SUMS[self.how](y, skip)


class Concat(nn.Module):
    """Branches side by side."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.branches = nn.ModuleList(sequence(b) for b in spec["branches"])
        self.through = spec["through"]

    def forward(self, x: Tensor) -> Tensor:
        parts = [b(x) for b in self.branches]
        return torch.cat([x, *parts] if self.through else parts, dim=1)


class Split(nn.Module):
    """A body on half of the channels."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.body, self.spec = sequence(spec["body"]), spec

    def forward(self, x: Tensor) -> Tensor:
        half, how = self.spec["half"], self.spec["how"]
        a, b = x[:, :half], x[:, half:]
        if how != "slice":
            a, b = x.chunk(2, dim=1) if how == "chunk" else torch.split(x, half, dim=1)
        y = torch.cat((a, self.body(b)), 1)
        if not self.spec["shuffle"]:
            return y
        return y.view(y.shape[0], 2, half, *y.shape[2:]).transpose(1, 2).reshape(y.shape)


class Shared(nn.Module):
    """One body, called twice."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.body, self.how = sequence(spec["body"]), spec["how"]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chain":
            return self.body(self.body(x))  # type: ignore[no-any-return]
        other = F.relu(x) if self.how == "relu" else 0.5 * x
        return self.body(x) + self.body(other)  # type: ignore[no-any-return]


class Squeeze(nn.Module):
    """x with a gate, or a sum, from its mean over positions."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.conv, self.how = layer(spec["conv"]), spec["how"]
        self.axes = tuple(range(2, 2 + spec["conv"]["nd"]))

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x.mean(self.axes, keepdim=True))
        return x * torch.sigmoid(z) if self.how == "mul" else x + z


class Function(nn.Module):
    """Dropout, pooling or upsampling as a function."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        s = self.spec
        if s["kind"] == "dropout":
            return F.dropout(x, s["p"], self.training)
        if s["kind"] == "upsample":
            return F.interpolate(x, scale_factor=2, mode=s["mode"])
        pool: Callable[..., Tensor] = getattr(F, f"max_pool{s['nd']}d")
        return pool(x, s["kernel"], s["stride"], s["padding"], ceil_mode=s["ceil"])


class Head(nn.Module):
    """From a map to what the loss reads."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.kind, self.axes = spec["kind"], tuple(range(2, 2 + len(spec["size"])))
        width = spec["channels"] * (math.prod(spec["size"]) if self.kind == "flatten" else 1)
        self.pool: nn.Module = getattr(nn, f"AdaptiveAvgPool{len(spec['size'])}d")(1)
        self.linear = nn.Linear(width, spec["out"])

    def forward(self, x: Tensor) -> Any:
        if self.kind == "dense":
            return x
        if self.kind == "pair":
            return x, self.linear(x.mean(self.axes))
        if self.kind == "flatten":
            return self.linear(torch.flatten(x, 1))
        if self.kind == "adaptive":
            return self.linear(self.pool(x).flatten(1))
        return self.linear(x.amax(self.axes) if self.kind == "max" else x.mean(self.axes))


def layer(s: Spec) -> nn.Module:
    """The module of one spec."""
    kinds: dict[str, Callable[[Spec], nn.Module]] = {
        "conv": _conv,
        "transposed": _transposed,
        "norm": _norm,
        "act": _act,
        "pool": _pool,
        "dropout": _dropout,
        "upsample": _upsample,
        "residual": Residual,
        "concat": Concat,
        "split": Split,
        "shared": Shared,
        "squeeze": Squeeze,
    }
    return kinds[s["kind"]](s)


def sequence(specs: list[Spec]) -> nn.Sequential:
    """The modules of several specs, in order."""
    return nn.Sequential(*map(layer, specs))


def _conv(s: Spec) -> nn.Module:
    names = ("in", "out", "kernel", "stride", "padding", "dilation", "groups", "bias", "mode")
    values = [tuple(s[n]) if isinstance(s[n], list) else s[n] for n in names]
    conv = getattr(nn, f"Conv{s['nd']}d")(*values)
    return conv if s["pad"] is None else Padded(conv, s)


def _transposed(s: Spec) -> nn.Module:
    names = ("in", "out", "kernel", "stride", "padding", "extra", "groups", "bias", "dilation")
    make: Callable[..., nn.Module] = getattr(nn, f"ConvTranspose{s['nd']}d")
    return make(*(s[n] for n in names))


def _norm(s: Spec) -> nn.Module:
    make: Callable[..., nn.Module] = getattr(nn, f"BatchNorm{s['nd']}d")
    return make(s["channels"], affine=s["affine"], track_running_stats=s["track"])


def _act(s: Spec) -> nn.Module:
    if s["name"] == "PReLU":
        return nn.PReLU(s["channels"] if s["channels"] % 2 else 1)
    if (s["name"], s["style"]) in FUNCTIONS:
        return Activation(s["name"], s["style"])
    return MODULES[s["name"]](**({"inplace": True} if s["style"] == "inplace" else {}))


def _pool(s: Spec) -> nn.Module:
    if s["name"] == "FMax":
        return Function(s)
    make: Callable[..., nn.Module] = getattr(nn, f"{s['name']}Pool{s['nd']}d")
    if s["name"].startswith("Adaptive"):
        return make(s["size"])
    options: Spec = {} if s["name"] == "Max" else {"count_include_pad": s["include"]}
    return make(s["kernel"], s["stride"], s["padding"], ceil_mode=s["ceil"], **options)


def _upsample(s: Spec) -> nn.Module:
    names = {1: "linear", 2: "bilinear", 3: "trilinear"}
    mode = s["mode"] if s["mode"] == "nearest" else names[s["nd"]]
    return Function({**s, "mode": mode}) if s["style"] == "function" else nn.Upsample(None, 2, mode)


def _dropout(s: Spec) -> nn.Module:
    if s["style"] == "function":
        return Function(s)
    if s["style"] == "spatial":
        return getattr(nn, f"Dropout{s['nd']}d")(s["p"])  # type: ignore[no-any-return]
    return nn.Dropout(s["p"], inplace=s["style"] == "inplace")


def network(spec: Spec) -> nn.Module:
    """The network of a whole spec: weights, statistics, precision, mode and flags as it says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec["seed"])
        model = nn.Sequential(sequence(spec["layers"]), Head(spec["head"]))
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                _randomize(m)
    if spec["channels_last"]:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _flag(model, spec["grad"])
    return model.to(torch.float64 if spec["double"] else torch.float32).train(spec["train"])


def _randomize(bn: Any) -> None:
    if bn.running_mean is not None:
        nn.init.normal_(bn.running_mean, std=0.3)
        nn.init.uniform_(bn.running_var, 0.3, 2.0)
    if bn.weight is not None:
        nn.init.uniform_(bn.weight, -1.5, 1.5)
        nn.init.normal_(bn.bias, std=0.5)


def _flag(model: nn.Module, which: str) -> None:
    norms, convs = nn.modules.batchnorm._BatchNorm, nn.modules.conv._ConvNd
    for m in model.modules():
        for name, p in m.named_parameters(recurse=False):
            wanted = {
                "all": True,
                "norms": isinstance(m, norms),
                "biases": name == "bias",
                "convs": isinstance(m, convs),
                "last": isinstance(m, nn.Linear),
            }
            p.requires_grad_(wanted[which])


def batch(spec: Spec) -> Tensor:
    """An input of the drawn size and layout."""
    g = torch.Generator().manual_seed(spec["seed"])
    shape = (spec["batch"], spec["channels"], *spec["size"])
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x = x.to(torch.float64 if spec["double"] else torch.float32)
    return x.contiguous(memory_format=torch.channels_last) if spec["channels_last"] else x
