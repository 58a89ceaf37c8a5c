"""The adaptation methods by name: which passes make one, how its BatchNorms run, whether it merges.

A method is a pipeline of passes over the traced source; nothing else sets it apart. Formulas and
sources stand in the files that hold the layers (fused, paper, factor, lora, lite, branch). Methods from outside
come by `register`, or by an entry point of the group `floorplan.methods` that names a Method.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from torch import Tensor

from floorplan import passes
from floorplan.errors import FloorplanError, describe
from floorplan.graph.driver import Pass
from floorplan.ledger.inputs import shapes_of
from floorplan.passes import canonicalize, pack_gates
from floorplan.passes.insert_adapter import lora
from floorplan.passes.insert_branch import branch
from floorplan.passes.insert_memflora import memflora
from floorplan.passes.insert_paper import paper
from floorplan.passes.insert_tinytl import tinytl
from floorplan.passes.set_trainable import trainable


@dataclass(frozen=True)
class Options:
    """What a user can set about a method; methods without adapters ignore rank, sites and seed."""

    rank: int = 2
    sites: str = "auto"
    seed: int = 0
    train_head: bool = False


@dataclass(frozen=True)
class Plan:
    """A method by name, with its options."""

    method: str
    options: Options

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Plan":
        """From the plain data of `as_dict`; FloorplanError for a method that is not known."""
        rest = dict(options)
        return cls(method(rest.pop("method")).name, Options(**rest))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in reports and adapted files."""
        return {"method": self.method, **asdict(self.options)}


def plans_of(methods: Iterable[str], ranks: Sequence[int], options: Options) -> list[Plan]:
    """Each method at each rank, once; what has no rank is there once."""
    chosen, every = [method(n) for n in dict.fromkeys(methods)], list(dict.fromkeys(ranks))
    return [Plan(m.name, replace(options, rank=r)) for m in chosen for r in (every if m.ranked else every[:1])]


def recorded(plan: Plan, inputs: Sequence[Any]) -> dict[str, Any]:
    """What an adapted model says about itself; `plain` inputs are float tensors and nothing else."""
    plain = all(isinstance(t, Tensor) and t.is_floating_point() for t in inputs)
    return {**plan.as_dict(), "input": shapes_of(inputs), "plain": plain}


_Passes = Callable[[Options], tuple[Pass, ...]]


@dataclass(frozen=True)
class Method:
    """A named pipeline of passes."""

    name: str
    summary: str
    passes: _Passes
    ranked: bool = True  # takes a rank
    bn_trains: bool = False  # BatchNorms use the batch's statistics while training
    merges: bool = True  # goes back into plain conv weights
    replays: bool = False  # trains its down-projections by a second forward (MemFLoRA eq. 12)


def _only(what: str) -> _Passes:
    return lambda o: (trainable(what, o.train_head and what != "full"),)


def _lora(kind: str) -> _Passes:
    return lambda o: (lora(kind, o.rank, o.sites, o.seed, o.train_head),)


def _paper(o: Options) -> tuple[Pass, ...]:
    return (canonicalize.PASS, paper(o.rank, o.sites, o.seed, o.train_head), pack_gates.PASS)


def _memflora(projection: str = "normal", scaled: bool = True) -> _Passes:
    return lambda o: passes.pipeline(memflora(o.rank, o.sites, o.seed, o.train_head, projection, scaled))


def _branch(kernel: str, bn: bool = False) -> _Passes:
    return lambda o: passes.pipeline(branch(o.rank, o.sites, o.seed, o.train_head, kernel, bn))


def _tinytl(bn: bool) -> _Passes:
    gates = () if bn else (pack_gates.PASS,)
    return lambda o: (canonicalize.PASS, tinytl(bn, o.seed, o.train_head), *gates)


_ALL = (
    Method("zero-shot", "the source model as it is", _only("none"), ranked=False, merges=False),
    Method("full", "every parameter trains", _only("full"), False, True, False),
    Method("bias", "biases of convs and normalizations", _only("bias"), False, True, False),
    Method("bn", "weights and biases of normalizations", _only("norm"), False, True, False),
    Method("lora-c", "LoRA-C as the MemFLoRA paper runs it", _lora("lora-c"), bn_trains=True),
    Method("lora-c-official", "LoRA-C as published", _lora("lora-c-official"), bn_trains=True),
    Method("lora-edge", "frozen TT-SVD suffix, trained core", _lora("lora-edge"), bn_trains=True),
    Method("lora-conv", "peft's LoRA on a conv", _lora("lora-conv"), bn_trains=True),
    Method("lora-fa", "LoRA with a frozen random down-factor", _lora("lora-fa"), bn_trains=True),
    Method("memflora", "MemFLoRA, folded, fused and merged on the fly", _memflora()),
    Method("memflora-paper", "MemFLoRA's two branches as published", _paper),
    Method("memflora-sg", "MemFLoRA with replayed gradients of P", _memflora(), replays=True),
    Method("memflora-orthogonal", "MemFLoRA, P's rows orthonormal", _memflora("orthogonal")),
    Method(
        "memflora-orthogonal-matched", "MemFLoRA, P's rows orthonormal times sqrt(I/r)", _memflora("orthogonal-matched")
    ),
    Method("memflora-noscale", "MemFLoRA without the scale a", _memflora(scaled=False)),
    Method("memflora-bnr", "MemFLoRA, BatchNorm of q instead of a", _branch("up", True), merges=False),
    Method("memflora-kernel-down", "MemFLoRA, the kernel in P", _branch("down")),
    Method("tinytl", "TinyTL, BatchNorms by running statistics", _tinytl(False), False, merges=False),
    Method("tinytl-trainbn", "TinyTL, BatchNorms in train mode", _tinytl(True), False, True, False),
)
METHODS: dict[str, Method] = {m.name: m for m in _ALL}
_REGISTERED: dict[str, Method] = {}


def register(m: Method) -> Method:
    """Make a method from outside known by its name; FloorplanError if another one has it."""
    if not isinstance(m, Method):
        raise FloorplanError(f"register: a {type(m).__name__} is no method; give a floorplan.Method")
    if (METHODS | _REGISTERED).get(m.name, m) != m:
        raise FloorplanError(f"method {m.name}: another method has that name; give this one another")
    _REGISTERED[m.name] = m
    return m


@cache
def _outside() -> EntryPoints:
    return entry_points(group="floorplan.methods")


def _loaded(point: EntryPoint) -> Method:
    """The method of an entry point; FloorplanError if it gives none of its name."""
    where = f"method {point.name}: entry point {point.value}"
    try:
        found = point.load()
    except Exception as e:  # whatever the import of another's package raises
        raise FloorplanError(f"{where} cannot be loaded ({describe(e, 120)}); repair or remove that package") from e
    if not isinstance(found, Method) or found.name != point.name:
        what = f"the method {found.name}" if isinstance(found, Method) else f"a {type(found).__name__}"
        raise FloorplanError(f"{where} is {what}; it must be a floorplan.Method of the entry point's name")
    return found


def method_names() -> list[str]:
    """All that `method` takes: these, those of installed packages, those that were registered."""
    return list(dict.fromkeys([*METHODS, *_REGISTERED, *sorted(_outside().names)]))


def method(name: str) -> Method:
    """The method of that name; FloorplanError lists them all."""
    for point in _outside().select(name=name):
        register(_loaded(point))
    known = METHODS | _REGISTERED
    if name not in known:
        raise FloorplanError(f"method {name}: not known; use {', '.join(method_names())}")
    return known[name]
