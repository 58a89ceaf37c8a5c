"""Fake copies of a model and its inputs, with symbolic batch, widths, positions and rank.

    batch B         one symbol, shared by all inputs
    widths C1, C2…  the first two dimensions of every parameter and buffer; equal widths share a symbol
    positions       H0, W0 (T0 in 1-D, D0 first in 3-D): the inputs' spatial sizes
    rank r          the bottleneck of every adapter, never a width

Hints are chosen so that nothing is unified by accident: a prime for B, for r and for each position.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from floorplan.errors import FloorplanError
from floorplan.graph.copies import clone_structure, own_tensors, replace_tensors
from floorplan.layers.adapter import adapters
from floorplan.layers.layer import Adapter
from floorplan.ledger.kernels import quiet_fakes
from floorplan.ledger.sizes import Sized
from floorplan.torch_doors import ConstantSource, ConvNd, FakeTensorMode, directly, storage_key, tree_map

DUCK, STATIC, DYNAMIC = DimDynamic.DUCK, DimDynamic.STATIC, DimDynamic.DYNAMIC
AXES = {1: ("T0",), 2: ("H0", "W0"), 3: ("D0", "H0", "W0")}


@dataclass(frozen=True)
class Sizes:
    """How the run's sizes are chosen: positions as symbols near the real ones, equal to them, or fixed."""

    positions: str  # "primes", "exact" or "fixed"
    across: bool = False  # the batch lies on the other side of 16, where torch chooses kernels
    taken: frozenset[int] = frozenset()  # sizes that no hint may have


@dataclass(frozen=True)
class Fakes:
    """A fake model with fake inputs, and the names of the symbols in their sizes."""

    mode: FakeTensorMode
    gm: Any  # the model, a graph or a module
    inputs: tuple[Any, ...]
    names: dict[sympy.Symbol, sympy.Symbol]  # ShapeEnv's symbol -> ours
    values: dict[str, int]  # our name -> the size the user gave
    layers: dict[str, str]  # width name -> the layer that shows it first
    env: Sized | None
    batch: int = 0  # the number that stands for B in a symbolic run

    def forward(self) -> Any:
        """What the model returns, without autograd."""
        with quiet_fakes(), self.mode, torch.no_grad():
            return self.gm(*self.inputs)

    def on(self, inputs: Sequence[Any]) -> "Fakes":
        """The same concrete fake model on other inputs: for runs that leave it as it was, but for gradients."""
        return replace(self, inputs=tree_map(lambda t: _fake_input(self.mode, t), tuple(inputs)))


def concrete_fakes(gm: nn.Module, inputs: Sequence[Any]) -> Fakes:
    """Fakes of exactly these sizes on the model's own device: nothing symbolic."""
    mode = FakeTensorMode()
    twin = clone_structure(gm)
    replace_tensors(twin, lambda name, t, m: mode.from_tensor(t.detach(), static_shapes=True))
    return Fakes(mode, twin, (), {}, {}, {}, None).on(inputs)


def _fake_input(mode: FakeTensorMode, t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    fake = mode.from_tensor(t.detach(), static_shapes=True)
    return fake.requires_grad_(t.requires_grad)


def _primes_from(n: int, used: set[int]) -> int:
    n = max(n, 7)
    while n in used or not sympy.isprime(n):
        n += 1
    used.add(n)
    return n


class _Symbolic:
    """Builds symbolic fakes; one instance a run."""

    def __init__(self, gm: nn.Module, sizes: Sizes, device: str | None, batch: int) -> None:
        self.env = Sized()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False
        self.sizes, self.device = sizes, device
        self.widths = {n for t in _all_tensors(gm) for n in t.shape[:2]}
        self.used = {n for t in _all_tensors(gm) for n in t.shape} | sizes.taken
        self.storages = Counter(storage_key(t) for t in {id(t): t for t in _all_tensors(gm)}.values())
        self.made: dict[tuple[Any, ...], Any] = {}  # a fake of each kind
        self.hints: dict[tuple[int, int], int] = {}  # (axis from the end, size) -> its prime
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}
        self.values: dict[str, int] = {}
        self.layers: dict[str, str] = {}
        self.axes = {id(_factor(a, path, n)): of for path, a in adapters(gm) for n, of in a.axes().items()}
        self.rank_hint = _primes_from(11, self.used)
        near, far = (11, 17) if batch < 16 else (23, 11)
        self.batch_hint = _primes_from(far if sizes.across else near, self.used)

    def fake(self, name: str, shape: Sequence[int], like: Tensor, dims: Sequence[Any]) -> Tensor:
        if list(shape) == list(like.shape):
            meta = like.detach()
        else:
            meta = torch.empty(shape, dtype=like.dtype, device=self.device or like.device)
            if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
                meta = meta.to(memory_format=torch.channels_last)
        if self.device is not None:
            meta = meta.to(self.device)
        dims = [d if n > 1 else STATIC for d, n in zip(dims, meta.shape, strict=True)]
        symbolic: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        source = ConstantSource("".join(c if c.isalnum() else "_" for c in name))
        return self.mode.from_tensor(meta, symbolic_context=symbolic, source=source)

    def state(self, name: str, t: Tensor, m: nn.Module) -> Tensor:
        axes = self.axes.get(id(t), "CC").ljust(t.dim(), ".")
        shape = [self.rank_hint if a == "r" else n for a, n in zip(axes, t.shape, strict=False)]
        key, alone = (*shape, *t.stride(), axes, t.dtype, t.device), self.storages[storage_key(t)] == 1
        if (first := self.made.get(key)) is not None and alone:  # equal sizes share their symbols
            return directly(first, torch.empty_strided, first.shape, first.stride(), dtype=t.dtype, device="meta")
        fake = self.fake(name, shape, t, [STATIC if a == "." else DUCK for a in axes[: t.dim()]])
        self.made[key] = fake
        for size, a, n in zip(fake.shape, axes, t.shape, strict=False):
            self._name(size, a, n, name)
        return fake

    def input(self, name: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        shape, dims = list(t.shape), [DUCK] * min(t.dim(), 2)
        axes = AXES.get(t.dim() - 2, ())
        for i in range(2, t.dim()):
            dims.append(STATIC if self.sizes.positions == "fixed" or not axes else DYNAMIC)
            if axes and self.sizes.positions == "primes":
                place = (i - t.dim(), t.shape[i])
                if place not in self.hints:
                    self.hints[place] = _primes_from(t.shape[i], self.used)
                shape[i], dims[i] = self.hints[place], DUCK
        if t.dim():
            shape[0] = self.batch_hint
        fake = self.fake(name, shape, t, dims).requires_grad_(t.requires_grad)
        for i, n in enumerate(t.shape):
            kind = "B" if i == 0 else axes[i - 2] if i > 1 and axes else ""
            if i == 1:  # a width only if a layer has it; else a position, such as time in (B, T, S)
                kind = "C" if n in self.widths else "T0"
            self._name(fake.shape[i], kind, n, name)
        return fake

    def _name(self, size: Any, kind: str, value: int, where: str) -> None:
        symbol = getattr(getattr(size, "node", None), "expr", None)
        if not isinstance(symbol, sympy.Symbol) or symbol in self.names or not kind:
            return
        name = kind
        if kind == "C":
            name = f"C{1 + len(self.layers)}"
            self.layers[name] = where.rpartition(".")[0] or where
        elif kind in self.values:  # a second input with other positions
            name = f"{kind[0]}{sum(n[0] == kind[0] for n in self.values)}_in"
        self.names[symbol] = sympy.Symbol(name, positive=True, integer=True)
        self.values[name] = value


def _all_tensors(gm: nn.Module) -> list[Tensor]:
    return [t for m in gm.modules() for t in own_tensors(m)]


def symbolic_fakes(gm: Any, inputs: Sequence[Any], sizes: Sizes, device: str | None = None) -> Fakes:
    """Fakes with symbolic sizes on `device` (None: where the model lives)."""
    batch = next((t.shape[0] for t in inputs if isinstance(t, Tensor) and t.dim()), 1)
    taken = frozenset(t.shape[1] for t in inputs if isinstance(t, Tensor) and t.dim() > 1)
    s = _Symbolic(gm, replace(sizes, taken=taken), device, batch)
    twin = clone_structure(gm)
    names = iter(n.name for n in twin.graph.nodes if n.op == "placeholder")
    replace_tensors(twin, s.state)
    fake = tuple(tree_map(lambda t, n=name: s.input(n, t), v) for name, v in zip(names, inputs, strict=False))
    _symbolic_groups(twin)
    return Fakes(s.mode, twin, fake, s.names, s.values, s.layers, s.env, s.batch_hint)


def _symbolic_groups(gm: nn.Module) -> None:
    """Give depthwise convs their width as the number of groups, or it is pinned to a number."""
    for m in gm.modules():
        if isinstance(m, ConvNd) and m.groups > 1 and m.groups == m.in_channels:
            if m.out_channels == m.in_channels:
                m.groups = m.weight.shape[0]


def _factor(a: Adapter, path: str, name: str) -> Any:
    """The tensor of that name; FloorplanError if the layer has none."""
    try:
        return attrgetter(name)(a)
    except AttributeError as e:
        raise FloorplanError(f"{path}: axes() of {type(a).__name__} names {name}, which the layer does not have") from e
