"""Sizes as a fake run has them, made by hand: B, C1, C2, H0, W0 and r behind symbols of their own."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import sympy

from floorplan.ledger.criterion import Entry
from floorplan.ledger.fakes import Fakes

VALUES = {"B": 4, "C1": 8, "C2": 16, "H0": 12, "W0": 10, "r": 2}
OURS = {n: sympy.Symbol(n, positive=True, integer=True) for n in VALUES}
THEIRS = {n: sympy.Symbol(f"s{i}", positive=True, integer=True) for i, n in enumerate(VALUES)}
B, C1, C2, H0, W0, R = OURS.values()


def sized(e: Any) -> Any:
    """A size of the run for an expression in our symbols: an int, or what stands for a SymInt."""
    e = sympy.sympify(e).xreplace({OURS[n]: THEIRS[n] for n in VALUES})
    return int(e) if e.is_number else SimpleNamespace(node=SimpleNamespace(expr=e))


def fakes(pinned: dict[str, int] | None = None, guards: Iterable[Any] = (), inputs: tuple[Any, ...] = ()) -> Fakes:
    """Fakes of a run that turned some symbols into numbers and added guards (in our symbols)."""
    numbers = {THEIRS[n]: sympy.Integer(v) for n, v in (pinned or {}).items()}
    theirs = [g.xreplace({OURS[n]: THEIRS[n] for n in VALUES}) for g in guards]
    env: Any = SimpleNamespace(written_out=lambda e: e.xreplace(numbers), learned=lambda: list(theirs))
    names = {THEIRS[n]: OURS[n] for n in VALUES}
    mode: Any = None
    return Fakes(mode, None, inputs, names, dict(VALUES), {"C1": "a", "C2": "b"}, env)


def evaluate(entries: list[Entry], sizes: Mapping[str, int]) -> int:
    """Distinct kept bytes at other sizes, such as another batch: {"B": 64, "H0": 97, …}."""
    once: dict[int, Any] = {e.storage: e.size for e in entries if e.owner == "kept"}
    point = {sympy.Symbol(k, positive=True, integer=True): sympy.Integer(v) for k, v in sizes.items()}
    return sum(int(size.xreplace(point)) for size in once.values())
