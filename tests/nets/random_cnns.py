"""Random small CNNs: a spec of plain data drawn by hypothesis, and the module it describes.

    spec = draw(networks())   ->   random_layers.network(spec), random_layers.batch(spec)

A spec is a dict of numbers, strings and lists, so a failing example prints as something that can be
pasted back. Sizes are tracked while drawing: every spec builds and runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from random_layers import FUNCTIONS, MODULES, Spec

Draw = Callable[..., Any]

STYLES = {name: ["module"] + ["inplace"] * (name not in ("Tanh", "Sigmoid")) for name in MODULES}
for _name, _style in FUNCTIONS:
    STYLES[_name].append(_style)


@dataclass
class State:
    """What a drawing knows about the tensor so far."""

    draw: Draw
    channels: int
    size: list[int]
    keep: bool = False  # positions may not change
    fresh: bool = False  # made by the last op, which does not keep it: may be overwritten
    depth: int = 0
    budget: list[int] = field(default_factory=lambda: [7])

    def pick(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, max(low, high))))

    def chance(self) -> bool:
        return bool(self.draw(st.booleans()))

    def inner(self, channels: int | None = None) -> "State":
        new = replace(self, channels=channels or self.channels, size=list(self.size))
        new.keep, new.fresh, new.depth = True, False, self.depth + 1
        return new


def _divisors(*ns: int) -> list[int]:
    return [d for d in range(1, min(ns) + 1) if all(n % d == 0 for n in ns)]


def conv(s: State, out: int | None = None, plain: bool = False) -> Spec:
    """A convolution of s; updates s."""
    depthwise = not plain and out is None and s.number(0, 4) == 0
    if depthwise:
        out, groups = s.channels * (s.pick(1, 2) if s.channels < 5 else 1), s.channels
    else:
        out = out or s.pick(6, 5, 8, 4, 3, 7, 9, 2)
        groups = s.pick(1, 1, *_divisors(s.channels, out))
    spec = _conv(s, out) | {"groups": groups, "pad_mode": "constant", "value": 0}
    axes = [_axis(s, n, plain) for n in s.size]
    if s.chance():
        axes = [_axis(s, min(s.size), plain)] * len(s.size)
    spec |= {k: [a[k] for a in axes] for k in ("kernel", "stride", "dilation")}
    pads = [a["pads"] for a in axes]
    if s.keep and s.pick(False, True):
        spec["padding"] = "same"
        pads = [_same(a) for a in axes]
    elif not any(map(any, pads)) and s.chance():
        spec["padding"] = "valid"
    elif all(lo == hi for lo, hi in pads) and s.chance():
        spec["padding"] = [lo for lo, _ in pads]
    else:
        spec["padding"], spec["pad"] = 0, [p for pair in reversed(pads) for p in pair]
    _padding_mode(s, spec, pads)
    s.size = [
        (n + sum(p) - a["dilation"] * (a["kernel"] - 1) - 1) // a["stride"] + 1
        for n, p, a in zip(s.size, pads, axes, strict=True)
    ]
    s.channels, s.fresh = out, True
    return spec


def _conv(s: State, out: int, kernel: int = 1, stride: int = 1, padding: int = 0) -> Spec:
    nd = len(s.size)
    return {
        "kind": "conv",
        "in": s.channels,
        "out": out,
        "groups": 1,
        "bias": s.chance(),
        "nd": nd,
        "mode": "zeros",
        "pad": None,
        "kernel": [kernel] * nd,
        "stride": [stride] * nd,
        "dilation": [1] * nd,
        "padding": [padding] * nd,
    }


def _axis(s: State, n: int, plain: bool) -> Spec:
    kernel = s.number(1, min(3 if plain else 5, n))
    dilation = s.number(1, 2) if 2 * (kernel - 1) < n else 1
    reach = dilation * (kernel - 1)
    a = {"kernel": kernel, "dilation": dilation}
    if s.keep:
        return {**a, "stride": 1, "pads": _same(a)}
    most = min(reach, n - 1)
    lo = s.number(0, most)
    hi = lo if s.chance() else s.number(0, most)
    return {**a, "stride": s.pick(1, 1, 2, 3) if n > 3 else 1, "pads": (lo, hi)}


def _same(a: Spec) -> tuple[int, int]:
    total = a["dilation"] * (a["kernel"] - 1)
    return total // 2, total - total // 2


def _padding_mode(s: State, spec: Spec, pads: list[tuple[int, int]]) -> None:
    fits = all(max(p) < n for p, n in zip(pads, s.size, strict=True))
    mode = s.pick("zeros", "zeros", "reflect", "replicate", "circular") if fits else "zeros"
    if spec["pad"] is None:
        spec["mode"] = mode
    elif mode != "zeros":
        spec["pad_mode"] = mode
    else:
        spec["value"] = s.pick(0, 0, None, 0.5)


def transposed(s: State) -> Spec:
    """A transposed convolution that at most doubles the positions."""
    out = s.number(2, 6)
    kernel, stride = s.number(1, 4), s.number(1, 2)
    dilation, padding = s.number(1, 2), s.number(0, (kernel - 1) // 2)
    extra = s.number(0, max(stride, dilation) - 1)
    spec = {
        "kind": "transposed",
        "in": s.channels,
        "out": out,
        "nd": len(s.size),
        "kernel": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "extra": extra,
        "groups": s.pick(*_divisors(s.channels, out)),
        "bias": s.chance(),
    }
    reach = dilation * (kernel - 1)
    s.size = [(n - 1) * stride - 2 * padding + reach + extra + 1 for n in s.size]
    s.channels, s.fresh = out, True
    return spec


def norm(s: State) -> Spec:
    """A BatchNorm with drawn statistics."""
    s.fresh = True
    options = {"affine": s.pick(True, True, False), "track": s.pick(True, True, True, False)}
    return {"kind": "norm", "channels": s.channels, "nd": len(s.size), **options}


def activation(s: State) -> Spec:
    """An activation in one of its spellings; in place only on a fresh tensor."""
    name = s.pick("ReLU", "ReLU", "ReLU6", "PReLU", *STYLES)
    known = STYLES.get(name, ["module"])
    styles = [x for x in known if s.fresh or not (x == "inplace" or x.endswith("_"))]
    s.fresh = False
    return {"kind": "act", "name": name, "style": s.pick(*styles), "channels": s.channels}


def unit(s: State, out: int | None = None) -> list[Spec]:
    """conv with a BatchNorm and an activation before it, behind it, or not at all."""
    order = s.pick("cna", "cna", "cn", "ca", "c", "nac", "acn", "cncna")
    draws = {"n": norm, "a": activation}
    convs, specs = order.count("c"), list[Spec]()
    for letter in order:
        if letter == "c":
            convs -= 1
            specs.append(conv(s, out if convs == 0 else None))
        else:
            specs.append(draws[letter](s))
    return specs


def pool(s: State) -> Spec:
    """A pooling layer; positions stay above zero."""
    n, nd = min(s.size), len(s.size)
    name = s.pick("Max", "Max", "Avg", "AdaptiveAvg", "AdaptiveMax", "FMax")
    s.fresh = False
    if name.startswith("Adaptive"):
        size = s.number(1, 3)
        s.size = [size] * nd
        return {"kind": "pool", "name": name, "nd": nd, "size": size}
    kernel = s.number(1, min(3, n))
    stride, padding = s.number(1, 3), s.number(0, kernel // 2)
    ceil = s.chance()
    spec = {
        "kind": "pool",
        "name": name,
        "nd": nd,
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "ceil": ceil,
        "include": s.chance(),
    }
    probe = torch.empty(1, 1, *s.size, device="meta")
    shape = getattr(F, f"max_pool{nd}d")(probe, kernel, stride, padding, ceil_mode=ceil).shape
    s.size = [int(n) for n in shape[2:]]
    return spec


def body(s: State, out: int | None = None) -> list[Spec]:
    """A short sequence; ends with `out` channels if given."""
    specs = block(s) if s.chance() else []
    return specs + (unit(s, out) if out or s.chance() else [])


def residual(s: State) -> Spec:
    """A body added to its input, with a projection where channels or positions change."""
    out = s.channels if s.chance() else s.number(2, 8)
    stride = 1 if s.keep or min(s.size) < 4 else s.number(1, 2)
    inner = s.inner()
    first = [_strided(inner, 3, 1, out)] if stride > 1 else []
    inner.fresh = stride > 1
    main = first + body(inner, out)
    project = None
    if stride > 1 or out != s.channels:
        project = [_strided(s.inner(), 1, 0, out, stride)]
        project += [norm(s.inner(out))] if s.chance() else []
    hows = ["a+b", "b+a", "add", "alpha", "sub"] + (["a+=b", "a+=b", "add_"] if inner.fresh else [])
    how = s.pick(*hows)
    s.size, s.channels, s.fresh = inner.size, out, True
    return {"kind": "residual", "body": main, "project": project, "how": how}


def _strided(s: State, kernel: int, padding: int, out: int, stride: int = 2) -> Spec:
    spec = _conv(s, out, kernel, stride, padding)
    s.size = [(n - 1) // stride + 1 for n in s.size]
    s.channels = out
    return spec


def concat(s: State) -> Spec:
    """Branches side by side, the input itself sometimes among them."""
    branches, total = [], 0
    for _ in range(s.number(2, 3)):
        inner = s.inner()
        branches.append(unit(inner, s.number(1, 3)))
        total += inner.channels
    through = total + s.channels <= 12 and s.chance()
    s.channels, s.fresh = total + (s.channels if through else 0), True
    return {"kind": "concat", "branches": branches, "through": through}


def split(s: State) -> Spec:
    """A body on one part of the channels; the parts joined again, shuffled sometimes."""
    if s.channels < 4 or s.channels % 2:
        return concat(s)
    half = s.channels // 2
    inner = s.inner(half)
    spec = {
        "kind": "split",
        "how": s.pick("chunk", "split", "slice"),
        "half": half,
        "body": body(inner, half),
        "shuffle": s.chance(),
    }
    s.fresh = True
    return spec


def shared(s: State) -> Spec:
    """The same modules called twice."""
    inner = s.inner()
    specs = unit(inner, s.channels)
    s.fresh = False
    return {"kind": "shared", "body": specs, "how": s.pick("chain", "sum", "relu")}


def squeeze(s: State) -> Spec:
    """A gate, or a sum, from the mean over all positions."""
    s.fresh = True
    return {"kind": "squeeze", "conv": _conv(s, s.channels), "how": s.pick("mul", "add")}


def small(s: State) -> Spec:
    """Dropout, upsampling, or a lone layer."""
    kind = s.pick("dropout", "upsample", "norm", "act")
    if kind in ("norm", "act") or (kind == "upsample" and (s.keep or max(s.size) > 6)):
        return norm(s) if kind == "norm" else activation(s)
    was, s.fresh = s.fresh, kind == "upsample"
    if kind == "dropout":
        styles = ["module", "spatial", "function"] + (["inplace"] if was else [])
        spec = {"kind": kind, "p": s.pick(0.5, 0.1, 0.0), "nd": len(s.size)}
        return {**spec, "style": s.pick(*styles)}
    s.size = [2 * n for n in s.size]
    return {"kind": kind, "nd": len(s.size), "mode": s.pick("nearest", "linear"), "style": s.pick("module", "function")}


def block(s: State) -> list[Spec]:
    """One block; blocks inside blocks are simple ones."""
    s.budget[0] -= 1
    simple: list[Callable[[State], Any]] = [unit, unit, small]
    moving = [] if s.keep else [pool, transposed]
    nested = [residual, residual, concat, split, shared, squeeze]
    nested = nested if s.depth < 2 and s.budget[0] > 0 else []
    spec = s.pick(*simple, *moving, *nested)(s)
    return spec if isinstance(spec, list) else [spec]


@st.composite
def networks(draw: Draw, dims: tuple[int, ...] = (1, 2, 2, 3)) -> Spec:
    """The spec of a network with its input, mode, precision and the flags of its parameters."""
    nd = draw(st.sampled_from(dims))
    high = {1: 12, 2: 9, 3: 6}[nd]
    size = draw(st.lists(st.integers(5, high), min_size=nd, max_size=nd))
    s = State(draw, draw(st.integers(2, 6)), list(size))
    first = {"channels": s.channels, "size": size, "batch": s.number(2, 3)}
    layers = unit(s)
    for _ in range(s.number(1, 3 if nd < 3 else 1)):
        layers += block(s)
    options = {
        "train": s.chance(),
        "double": s.chance(),
        "seed": s.number(0, 99),
        "grad": s.pick("all", "all", "norms", "biases", "convs", "last"),
        "channels_last": s.pick(False, False, True) and nd == 2,
    }
    kind = s.pick("mean", "adaptive", "flatten", "max", "dense", "pair")
    head = {"kind": kind, "channels": s.channels, "size": s.size, "out": s.number(2, 5)}
    return {**first, **options, "layers": layers, "head": head}
