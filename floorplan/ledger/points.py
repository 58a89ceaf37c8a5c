"""Other sizes at which a model can be asked: where batch and positions stand in its inputs, and how to solve for them.

inputs [B, 3, H0, W0]        Axes: B at (0, 0), H0 at (0, 2), W0 at (0, 3)
B > 16, H0*W0 <= 10000  ->   {"B": 17, "H0": 64, "W0": 64}
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from floorplan.ledger.fakes import AXES, Fakes
from floorplan.torch_doors import tensors_in, tree_map

Point = dict[str, int]  # name of a size -> its value
Answer = tuple[sympy.Expr, bool]  # a relation of sizes, and whether it holds
_MOST, _ALL = 5000, 4097  # points looked at for one question; values of one size alone


@dataclass(frozen=True)
class Axes:
    """Which axes of which input tensor are batch and positions, by the names of the proof."""

    names: dict[tuple[int, int], str]  # (number of the tensor among the inputs, axis) -> name
    given: Point  # the sizes that the caller gave

    @classmethod
    def of(cls, fakes: Fakes, inputs: Sequence[Any]) -> "Axes":
        """From the inputs of a symbolic run that has not begun, and the tensors that they stand for."""
        names: dict[tuple[int, int], str] = {}
        given: Point = {}
        pairs = zip(tensors_in(fakes.inputs), tensors_in(tuple(inputs)), strict=True)
        for k, (fake, t) in enumerate(pairs):
            for i, n in enumerate(fake.shape):
                symbol = fakes.names.get(getattr(getattr(n, "node", None), "expr", None))
                name = "" if symbol is None else symbol.name
                if not name and i > 1 and t.shape[i] > 1 and t.dim() - 2 in AXES:  # fixed in the proof
                    name = AXES[t.dim() - 2][i - 2]
                if name and name[0] != "C" and given.setdefault(name, t.shape[i]) == t.shape[i]:
                    names[k, i] = name
        return cls(names, given)

    @classmethod
    def plain(cls, inputs: Sequence[Any]) -> "Axes":
        """From the inputs alone."""
        names: dict[tuple[int, int], str] = {}
        given: Point = {}
        for k, t in enumerate(tensors_in(tuple(inputs))):
            for i, n in enumerate(t.shape):
                name = "B" if i == 0 else AXES[t.dim() - 2][i - 2] if i > 1 and t.dim() - 2 in AXES else ""
                if name and given.setdefault(name, n) == n:
                    names[k, i] = name
        return cls(names, given)

    def positions(self, share: float) -> Point:
        """The positions that were given, all larger or smaller by that."""
        return {k: max(1, int(v * share)) for k, v in self.given.items() if k != "B" and v > 1}

    def sizes_at(self, k: int, t: Tensor, point: Point) -> list[int]:
        """The shape of the k-th input tensor at a point."""
        return [point.get(self.names.get((k, i), ""), n) for i, n in enumerate(t.shape)]

    def at(self, inputs: tuple[Any, ...], point: Point, filled: bool = False) -> tuple[Any, ...]:
        """Inputs of the sizes of a point in the memory order of the given ones; filled: with values, cut or drawn."""
        count = itertools.count()

        def of(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            shape = self.sizes_at(next(count), t, point)
            made = _empty(t, shape)
            return (_fill(made, t) if filled else made).requires_grad_(t.requires_grad)

        return tuple(tree_map(of, inputs))


def _empty(t: Tensor, shape: Sequence[int]) -> Tensor:
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda d: (-strides[d], d))
    return torch.empty_permuted(list(shape), order, dtype=t.dtype, device=t.device)


def _fill(made: Tensor, t: Tensor) -> Tensor:
    """The given values, repeated or cut along each axis."""
    source = t.detach()
    for i, n in enumerate(made.shape):
        if n != source.shape[i]:
            source = source.index_select(i, torch.arange(n, device=t.device) % source.shape[i])
    return made.copy_(source)


def said(point: Point) -> str:
    """B = 17, H0 = 448"""
    return ", ".join(f"{k} = {v}" for k, v in point.items())


def _candidates(given: int, relations: Iterable[sympy.Expr]) -> list[int]:
    """Values worth a try for one size: multiples of the given one first, which a net's strides accept."""
    numbers = {abs(int(c)) for e in relations for c in e.atoms(sympy.Integer)}
    found = [given * k for k in (1, 2, 3, 4, 8)] + [given // k for k in (2, 4, 8)]
    for c in sorted(numbers):
        root = math.isqrt(c)
        found += [given * (c // given + 1), given * max(1, (c - 1) // given), c + 32 - c % 32, c - c % 32]
        found += [c, c + 1, c - 1, root, root + 1, *(c * k + d for k in (2, 4, 8, 16, 32) for d in (0, 1, -1))]
    found += [2, 3, 5, 17, 33, 65, 129, given + 1, given - 1, 1]
    return [n for n in dict.fromkeys(found) if n > 0]


def solutions(wanted: Sequence[Answer], start: Point) -> Iterator[Point]:
    """Points near `start` at which every relation answers as wanted; few if they are rare."""
    relations = [r for r, _ in wanted]
    names = sorted({s.name for r in relations for s in r.free_symbols} & start.keys())
    values = [_candidates(start[n], relations) for n in names]
    if len(names) == 1:  # one size: every value that a model is likely to compare it with
        values[0] = [*dict.fromkeys((*values[0], *range(1, _ALL)))]
    alone = {n: [(r, want) for r, want in wanted if {s.name for s in r.free_symbols} == {n}] for n in names}
    for i, n in enumerate(names):  # what one size decides is decided first
        values[i] = [v for v in values[i] if all(holds(r, {n: v}) is want for r, want in alone[n])]
        values[i] = values[i] if len(names) == 1 else values[i][: int(_MOST ** (1 / len(names)))]
    for chosen in itertools.islice(itertools.product(*values), _MOST):
        point = start | dict(zip(names, chosen, strict=True))
        if all(holds(r, point) is want for r, want in wanted):
            yield point


def holds(relation: sympy.Expr, point: Point) -> bool | None:
    """Whether a relation holds at a point; None where that cannot be told."""
    found = relation.xreplace({s: sympy.Integer(point[s.name]) for s in relation.free_symbols if s.name in point})
    return True if found == sympy.true else False if found == sympy.false else None
