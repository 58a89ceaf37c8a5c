"""Whether the samples of a batch touch: each op that a forward runs, in the mode it is in, by a rule or by trial.

    the forward on fakes of two batch sizes   the axis on which a value differs is the one of its samples
    an op                                     keeps to that axis by its rule, or is refused by node and line
    an op or module that no rule knows        real samples together and alone, outputs and gradients (trial.py)

Ops are those that pass the dispatcher, so every spelling, and what runs inside of an untraced module, is seen.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.layers.activations import PackedActivation
from floorplan.ledger.fakes import Fakes, concrete_fakes
from floorplan.ledger.inputs import resized
from floorplan.ledger.kernels import quiet_fakes
from floorplan.step.sample_rules import ASIDE, FRESH, SHUFFLES, UNSURE, Op, Samples, Seen, Value, rule_of
from floorplan.step.trial import refuse_unlike
from floorplan.torch_doors import (
    BatchNormNd,
    TorchDispatchMode,
    map_tensors,
    schema_of,
    storage_key,
    tensors_in,
    tree_iter,
    tree_map,
    wants_values,
)

SIZES = (1009, 1013)  # samples: primes, of which no product of a model's other sizes is a multiple
_SHAPES = ("size", "shape", "repeats", "N", "end", "stride", "storage_offset", "groups")
_KNOWN: WeakKeyDictionary[nn.Module, set[tuple[bool, ...]]] = WeakKeyDictionary()  # modes seen to be free of it


def batched(inputs: Any) -> list[bool]:
    """Of every tensor of the inputs, whether it has the samples in front: as many rows as the first."""
    found = list(tensors_in(inputs))
    n = next((t.shape[0] for t in found if t.dim()), 0)
    return [bool(t.dim()) and t.shape[0] == n for t in found]


def refuse_coupled(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """FloorplanError naming a node at which a sample sees the others of its batch, in the model's present mode."""
    mode = tuple(m.training for m in gm.modules())
    for name, m in gm.named_modules():
        if isinstance(m, BatchNormNd) and (m.training or m.running_mean is None):
            why = f"({type(m).__name__}) normalises by the batch, which parts would change"
            raise _refused(f"{name} {why}", ", or eval mode")
    if mode in _KNOWN.get(gm, ()):
        return
    fakes, unknown = concrete_fakes(gm, inputs), dict[str, str]()
    low, high = (_Forward(gm, fakes, inputs, n) for n in SIZES)
    if low.failed or high.failed:
        unknown[""] = low.failed or high.failed
    elif [op.name for op in low.ops] != [op.name for op in high.ops]:
        where = next((b.where for a, b in zip(low.ops, high.ops, strict=False) if a.name != b.name), "the forward")
        raise _refused(f"{where}: takes other steps for other batch sizes, which parts would change")
    else:
        for a, b in zip(low.ops, high.ops, strict=True):
            why, sure = touching(a, b)
            if why and sure:
                raise _refused(f"{a.where}: {why}, which parts would change")
            if why:
                unknown.setdefault(a.where, why)
        _refuse_outputs(low.out, high.out)
    for n in gm.graph.nodes:
        if _own_code(gm, n):
            unknown.setdefault(_where(n), "runs code that is not torch's")
    if unknown:
        refuse_unlike(gm, inputs, batched(tuple(inputs)), unknown)
    _KNOWN.setdefault(gm, set()).add(mode)


def _refused(what: str, more: str = "") -> FloorplanError:
    return FloorplanError(f"schedule: {what}; use the whole batch{more}")


def _refuse_outputs(low: Sequence[Value], high: Sequence[Value]) -> None:
    for a, b in zip(low, high, strict=True):
        if a.shape[:1] != (SIZES[0],) or b.shape[:1] != (SIZES[1],) or a.shape[1:] != b.shape[1:]:
            shape = ["B" if n == SIZES[0] else n for n in a.shape]
            why = f"the model's output {shape} does not have the samples in front"
            raise _refused(f"{why}, so a batch cannot be taken apart")


def _where(n: fx.Node) -> str:
    line = n.meta.get("line")
    return f"{n.name} ({line})" if line else n.name


def _own_code(gm: fx.GraphModule, n: fx.Node) -> bool:
    """Whether a node runs code of others, whose gradients no rule knows."""
    if n.op == "call_module":
        own = {type(m).__module__ for m in gm.get_submodule(str(n.target)).modules()}
    else:
        own = {getattr(n.target, "__module__", None) or "torch"} if n.op == "call_function" else set()
    return any(o.split(".")[0] not in ("torch", "floorplan", "operator", "_operator", "builtins", "math") for o in own)


class _Forward(fx.Interpreter):
    """One forward of n samples on fakes: its ops, and what it returns."""

    def __init__(self, gm: fx.GraphModule, fakes: Fakes, inputs: Sequence[Any], n: int) -> None:
        super().__init__(fakes.gm)
        self.extra_traceback, self.failed = False, ""
        self.named = dict(zip(fakes.gm.graph.nodes, map(_where, gm.graph.nodes), strict=True))
        self.seen = _Ops({storage_key(t): f"{name}" for name, t in _state(fakes.gm)})
        self.out: list[Value] = []
        rows = iter(batched(tuple(inputs)))
        with quiet_fakes(), fakes.mode, torch.no_grad(), self.seen:
            given = map_tensors(lambda t: resized(t, n) if next(rows) else fakes.mode.from_tensor(t), tuple(inputs))
            self.seen.ops.clear()
            try:
                self.out = [Value.of(t) for t in tensors_in(self.run(*given))]
            except FloorplanError:
                raise
            except Exception as e:  # whatever a model raises
                if not wants_values(e):
                    why = f"does not take another batch ({type(e).__name__}: {' '.join(str(e).split())[:120]})"
                    raise _refused(f"{self.seen.where}: {why}") from e
                self.failed = f"{self.seen.where} reads the values of tensors"

    @property
    def ops(self) -> list[Op]:
        """In order."""
        return self.seen.ops

    def run_node(self, n: fx.Node) -> Any:
        self.seen.where = self.named[n]
        m = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if m is None or not type(m).__module__.startswith("floorplan."):
            return super().run_node(n)
        self.seen.paused = True  # a layer of ours is known as a whole
        out = super().run_node(n)
        self.seen.paused = False
        name = "layer,pointwise" if isinstance(m, PackedActivation) else "layer"
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = {str(i): Value.of(t) for i, t in enumerate(tensors_in((args, kwargs)))}
        self.seen.ops.append(Op(name, self.named[n], given, [Value.of(t) for t in tensors_in(out)], False, ""))
        return out


def _state(gm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from gm.named_parameters()
    yield from gm.named_buffers()


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every op with its arguments by name, tensors as their shapes."""

    def __init__(self, state: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.ops, self.where, self.paused = state, list[Op](), "the forward", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, written = schema_of(func), ""
        names = [a.name for a in schema.arguments]
        bound = {a.name: a.default_value for a in schema.arguments} | dict(zip(names, args, strict=False)) | kwargs
        for a in schema.arguments:
            t = bound[a.name]
            if a.alias_info is not None and a.alias_info.is_write and isinstance(t, Tensor):
                written = written or self.state.get(storage_key(t), "")
        before = {k: tree_map(lambda t: Value.of(t) if isinstance(t, Tensor) else t, v) for k, v in bound.items()}
        out = func(*args, **kwargs)
        if not self.paused:
            plain = torch.Tag.pointwise in func.tags
            name = schema.name.removeprefix("aten::")
            made = [Value.of(t) for t in tensors_in(out)]
            self.ops.append(Op(name, self.where, before, made, plain, written))
        return out


def touching(low: Op, high: Op) -> tuple[str, bool]:
    """Why samples touch in an op, seen at two batch sizes, "" if they do not; and whether a rule says so."""
    if low.writes:
        return f"writes to {low.writes}, which every part would do", True
    try:
        ins = [_axis(a, b) for a, b in zip(_values(low.given), _values(high.given), strict=True)]
        outs = [_axis(a, b) for a, b in zip(low.made, high.made, strict=True)]
    except ValueError:
        return f"{low.name} makes something of another size than samples of their batch", True
    seen, rule = Seen(low, ins, outs), rule_of(low)
    if not seen.rows and not any(o.axis is not None for o in outs):
        return ("computes with the number of samples", True) if _differ(low, high, ()) else ("", True)
    if low.name in FRESH:
        return ("computes with the number of samples", True) if _differ(low, high, _SHAPES) else ("", True)
    if not seen.rows:
        alike = low.name in ("expand", "repeat")
        return ("", True) if alike else (f"{low.name} numbers the samples", low.name in SHUFFLES)
    if not outs:
        return "", True
    if _differ(low, high, _SHAPES):
        return "computes with the number of samples", True
    if not all(o.axis is not None for o in outs) and low.name not in ASIDE:
        return f"{low.name} over the samples of the batch", rule is not None
    if rule is None:
        return f"{low.name} has no rule", False
    why = rule(seen)
    return (f"{low.name} {why}", why != UNSURE) if why else ("", True)


def _values(given: dict[str, Any]) -> Iterator[Value]:
    return (v for v in tree_iter(given) if isinstance(v, Value))


def _axis(low: Value, high: Value) -> Samples:
    """The axis on which the two differ; ValueError if it is not one, or not in proportion."""
    if len(low.shape) != len(high.shape):
        raise ValueError
    found = [k for k, (a, b) in enumerate(zip(low.shape, high.shape, strict=True)) if a != b]
    if len(found) > 1 or any(low.shape[k] * SIZES[1] != high.shape[k] * SIZES[0] for k in found):
        raise ValueError
    return Samples(low.shape, found[0] if found else None)


def _differ(low: Op, high: Op, shapes: Sequence[str]) -> bool:
    """Whether numbers among the arguments depend on the batch, sizes apart."""

    def numbers(op: Op) -> list[str]:
        given = (v for k, a in op.given.items() if k not in shapes for v in tree_iter(a))
        return [repr(v) for v in given if isinstance(v, int | float)]

    return numbers(low) != numbers(high)
