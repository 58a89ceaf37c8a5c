"""Is the rewritten graph still the same model? Outputs and gradients, in float64."""

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, PassError
from floorplan.graph.driver import Pass
from floorplan.graph.untouched import in_mode
from floorplan.layers.adapter import adapters, zero_factors
from floorplan.layers.layer import Adapter
from floorplan.ledger.differ import relative_error, size_of
from floorplan.ledger.run import Step, Watch, observe
from floorplan.torch_doors import tensors_in, tree_map

FLOAT64 = 1e-12
M = TypeVar("M", bound=nn.Module)


class Mismatch(PassError):
    """A pass changed outputs or gradients; carries the largest relative difference."""


def randomize_adapters(gm: nn.Module, std: float = 0.05) -> None:
    """Draw every factor that starts at zero, by its name: at zero half of the gradients would be vacuous."""
    for name, p in zero_factors(gm).items():
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        p.data.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * std)


def set_plain(gm: nn.Module, plain: bool) -> None:
    """Let every site run by plain autograd (the reference), or by its own op."""
    for m in gm.modules():
        if isinstance(m, Adapter):
            m.plain = plain


@dataclass(frozen=True)
class Values:
    """Outputs and gradients of one run."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def values(gm: nn.Module, inputs: Sequence[Any], seed: int = 0) -> Values:
    """Run once; differentiate a fixed random weighting of the outputs by inputs and parameters."""

    def leaf(t: Any) -> Any:
        if isinstance(t, Tensor) and t.is_floating_point():
            return t.detach().clone().requires_grad_()
        return t.clone() if isinstance(t, Tensor) else t

    args = tree_map(leaf, tuple(inputs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # An in-place op may not touch a leaf that requires grad: hand over a view of its value.
        out = gm(*tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, args))
    outs = list(tensors_in(out))
    roots = [t for t in outs if t.requires_grad]
    leaves: dict[str, Tensor] = {f"parameter {n}": p for n, p in gm.named_parameters() if p.requires_grad}
    leaves |= {f"input {i}": t for i, t in enumerate(tensors_in(args)) if t.requires_grad}
    found: dict[str, Tensor] = {}
    if roots and leaves:
        g = torch.Generator().manual_seed(seed + 1)
        weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in roots]
        grads = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
        found = {n: t for n, t in zip(leaves, grads, strict=True) if t is not None}
    return Values([t.detach() for t in outs], found)


def moved(gm: nn.Module, inputs: Sequence[Any], seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of the model, and the inputs, each number of them one unit in its last place up or down."""
    g = torch.Generator().manual_seed(seed)

    def nudged(t: Any) -> Any:
        if not (isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta):
            return t
        up = torch.randint(2, t.shape, generator=g).to(t.device, torch.bool)
        return torch.where(up, *(torch.nextafter(t, torch.full_like(t, way)) for way in (torch.inf, -torch.inf)))

    twin = copy.deepcopy(gm)
    for p in twin.parameters():
        p.data = nudged(p.data)
    return twin, tuple(tree_map(nudged, tuple(inputs)))


AMPLIFIED = 10.0  # a pass rounds in every op of the net, the model moved by one unit in its inputs and weights alone


@dataclass(frozen=True)
class Rounding:
    """What a model makes of its own rounding: it run on inputs and weights moved by one unit in the last place."""

    model: nn.Module
    inputs: Sequence[Any]
    run: Callable[[nn.Module, Sequence[Any]], Values]

    @cached_property
    def seen(self) -> list[Values]:
        """Its values in three directions."""
        return [self.run(*moved(self.model, self.inputs, seed)) for seed in range(3)]


def compare(got: Values, want: Values, tolerance: float, what: str, rounding: Rounding | None = None) -> None:
    """Raise Mismatch if outputs or common gradients differ by more than `tolerance`, relative.

    A difference that the model's own rounding makes as well is none; it is asked for only where there is one.
    """
    if len(got.outputs) != len(want.outputs):
        raise Mismatch(f"{what}: {len(got.outputs)} outputs instead of {len(want.outputs)}")
    both = zip(got.outputs, want.outputs, strict=True)
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(both)]
    common = got.gradients.keys() & want.gradients.keys()
    if lost := [n for n in want.gradients if n.startswith("input") and n not in common]:
        raise Mismatch(f"{what}: no gradient reaches {lost[0]} any more")
    pairs += [(f"gradient of {n}", got.gradients[n], want.gradients[n]) for n in sorted(common)]
    # A gradient that is zero but for rounding (a bias before a BatchNorm) has no scale of its own.
    largest = max((size_of(t) for t in want.gradients.values()), default=0.0)
    for name, a, b in pairs:
        finite = torch.isfinite(b)
        floor = 1e-3 * largest if name.startswith("gradient") else 0.0
        same = a.shape == b.shape
        error = relative_error(a[finite], b[finite], floor) if same else float("inf")
        sane = same and torch.equal(finite, torch.isfinite(a))
        allowed = tolerance
        if error > tolerance and sane and rounding is not None:
            others = [_of(v, name) for v in rounding.seen]
            allowed = max(tolerance, *(AMPLIFIED * relative_error(t[finite], b[finite], floor) for t in others))
        if not (sane and error <= allowed):
            raise Mismatch(f"{what}: {name} differs by {error:.1e} (allowed {allowed:.0e})")


def _of(v: Values, name: str) -> Tensor:
    kind, _, key = name.partition(" ")
    return v.outputs[int(key)] if kind == "output" else v.gradients[key.removeprefix("of ")]


def runs_in_double(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Why a float64 copy of the graph cannot run (it casts by itself, say); "" if it can."""
    try:
        eval_outputs(copy.deepcopy(gm).double(), to_double(inputs))
    except Exception as e:  # whatever the copy raises, it is no reason to refuse the model
        return " ".join(str(e).split())[:200] or type(e).__name__
    return ""


def _drawn(gm: M) -> M:
    twin = copy.deepcopy(gm).eval()
    randomize_adapters(twin)
    return twin


def same_start(after: nn.Module, before: nn.Module, inputs: Sequence[Any], want: Values | None = None) -> None:
    """In its own precision, the adapted model must start as the source model in eval mode, which gives `want`."""
    want = want or start_of(before, inputs)
    if not all(bool(torch.isfinite(t).all()) for t in want.outputs):
        return  # a source that gives NaN or infinity has no values to start from
    eps = max((torch.finfo(t.dtype).eps for t in want.outputs if t.is_floating_point()), default=0.0)
    compare(start_of(after, inputs), want, 2000 * eps, "adapted against source", Rounding(before, inputs, start_of))


def start_of(m: nn.Module, inputs: Sequence[Any]) -> Values:
    """What a model gives in eval mode, from a copy of it."""
    return Values(eval_outputs(copy.deepcopy(m), inputs), {})


def eval_outputs(m: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    """All that a model gives in eval mode, in which it is left."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a dropout that is always on must draw the same each time
        return list(tensors_in(m.eval()(*inputs)))


def to_double(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs in float64."""

    def cast(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    return tuple(tree_map(cast, tuple(inputs)))


class Verifier:
    """The driver's check: after every pass, the graph computes what it computed before."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = to_double(inputs)
        self._last: tuple[fx.GraphModule, Values, int] | None = None  # the graph that came out, and what it keeps

    def __call__(self, p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        tolerance = max(p.tolerance, FLOAT64)
        own = Rounding(before, self.inputs, lambda gm, inputs: values(_drawn(gm), inputs))
        last = self._last if self._last is not None and self._last[0] is before else None
        want = last[1] if last else values(_drawn(before), self.inputs)
        twin = _drawn(after)
        got = values(twin, self.inputs)
        adapted = adapters(twin)
        if adapted:
            set_plain(twin, True)
            compare(
                got, values(twin, self.inputs), tolerance, "against plain autograd", Rounding(twin, self.inputs, values)
            )
            set_plain(twin, False)
        if adapted and not adapters(before):
            # The adapter has just come: with U = 0 the model must not have moved.
            for factor in zero_factors(twin).values():
                factor.data.zero_()
            compare(values(twin, self.inputs), want, tolerance, "at U = 0", own)
        else:
            compare(got, want, tolerance, "before and after", own)
        kept = kept_bytes(after, self.inputs)
        old, new = ({n for n, p in m.named_parameters() if p.requires_grad} for m in (before, after))
        if new <= old:  # what begins to train may keep more
            had = last[2] if last else kept_bytes(before, self.inputs)
            if kept > had:
                raise Mismatch(f"autograd keeps {kept:,} bytes where it kept {had:,}")
        self._last = (after, got, kept)


def kept_bytes(gm: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Bytes of the distinct storages kept for backward; state, inputs and packed bits apart."""
    saved = observe(Step(gm, tuple(inputs)).forward, Watch(hooks=True)).saved
    # A gate may stand beside a result that a later layer keeps anyway, so bits are not compared.
    kept = [s for s in saved if s.owner == "kept" and s.dtype != torch.uint8]
    return sum({s.storage: int(s.nbytes) for s in kept}.values())


def same_outputs(a: nn.Module, b: nn.Module, inputs: Sequence[Any], where: str) -> None:
    """Raise FloorplanError unless both give the same bits in eval mode."""
    results = []
    for m in (a, b):
        with in_mode(m, "eval"):
            results.append(eval_outputs(m, inputs))
    same = len(results[0]) == len(results[1])
    if not same or not all(torch.equal(x, y) for x, y in zip(*results, strict=True)):
        lost = "what was written does not load back to the same outputs"
        raise FloorplanError(f"{where}: {lost}; please report this model")
