"""Readable names for the symbols of a fake run: B, C3, H2, r; and formulas in them."""

from functools import cached_property
from typing import Any

import sympy

from floorplan.ledger.fakes import Fakes
from floorplan.ledger.sizes import both_sides
from floorplan.torch_doors import FloorDiv, tensors_in

_POSITION = "DHWT"


class Namer:
    """Translates sizes of one fake run; positions computed by strides get names of their own."""

    def __init__(self, fakes: Fakes) -> None:
        self.fakes = fakes
        self._guards = fakes.env.learned() if fakes.env is not None else []
        self.layers = dict(fakes.layers)
        self.ours = {v.name: v for v in fakes.names.values()}
        self.batch = self._resolved("B")
        self.rank = self._resolved("r") if "r" in self.ours else None
        self.aliases: dict[sympy.Expr, sympy.Symbol] = {}
        self.counts: dict[str, int] = {}
        self.point = {self.ours[n]: sympy.Integer(v) for n, v in fakes.values.items()}
        self.cache: dict[Any, sympy.Expr] = {}
        self.formulas: dict[Any, str] = {}
        self.texts: dict[sympy.Expr, str] = {}
        self.values_at: dict[sympy.Expr, int] = {}

    def _resolved(self, name: str) -> sympy.Expr:
        theirs = next((k for k, v in self.fakes.names.items() if v.name == name), None)
        return self.expr_of(theirs) if theirs is not None else self.ours.get(name)

    def expr_of(self, e: sympy.Expr) -> sympy.Expr:
        """An expression of the run's symbols in ours, with what the run learned about them."""
        env = self.fakes.env
        return (e if env is None else env.written_out(e)).xreplace(self.fakes.names)

    def expr(self, size: Any) -> sympy.Expr:
        """A size (int or SymInt) in our symbols."""
        node = getattr(size, "node", None)
        if node is None:
            return sympy.Integer(size)
        key = node.expr
        if key not in self.cache:
            self.cache[key] = self.expr_of(sympy.sympify(key))
        return self.cache[key]

    def is_width(self, x: sympy.Symbol) -> bool:
        """C1, C2, …"""
        return bool(x.name[0] == "C")

    def is_batch(self, x: sympy.Symbol) -> bool:
        """B."""
        return bool(x.name == "B")

    def is_position(self, x: sympy.Symbol) -> bool:
        """H0, W0, T0, D0, …"""
        return x.name[0] in _POSITION

    def at(self, e: sympy.Expr) -> int:
        """The value at the sizes asked for."""
        if e not in self.values_at:
            self.values_at[e] = int(sympy.sympify(e).xreplace(self.point))
        return self.values_at[e]

    def show(self, e: sympy.Expr) -> str:
        """One dimension: a number, a symbol, or a named position such as H2."""
        return self._text(self._alias(e))

    def _text(self, e: sympy.Expr) -> str:
        if e not in self.texts:
            self.texts[e] = str(e)
        return self.texts[e]

    def _alias(self, e: sympy.Expr) -> sympy.Expr:
        free = e.free_symbols
        if not free or e.is_Symbol or not all(self.is_position(x) for x in free):
            return e
        if e not in self.aliases:
            letters = {x.name[0] for x in free}
            letter = letters.pop() if len(letters) == 1 else "T"
            self.counts[letter] = self.counts.get(letter, 0) + 1
            self.aliases[e] = sympy.Symbol(f"{letter}{self.counts[letter]}", positive=True, integer=True)
        return self.aliases[e]

    def product(self, size: sympy.Expr, shape: list[sympy.Expr], itemsize: int) -> sympy.Expr | None:
        """itemsize * prod(shape) if it equals `size`, told by values at two far points."""
        candidate = sympy.Integer(itemsize) * sympy.prod(shape)
        if candidate == size:
            return candidate
        free = sorted(size.free_symbols | candidate.free_symbols, key=str)
        for start in (1009, 20011):
            point = {x: sympy.Integer(sympy.nextprime(start + 97 * i)) for i, x in enumerate(free)}
            if size.xreplace(point) != candidate.xreplace(point):
                return None
        return candidate

    def formula(self, size: sympy.Expr, shape: list[sympy.Expr], itemsize: int) -> str:
        """Bytes as a readable product: 4*B*r*H1*W1, ceil(B*C3*H1*W1/8)."""
        key = (size, *shape, itemsize, len(self.aliases))  # a position's name shortens what follows
        if key not in self.formulas:
            self.formulas[key] = self._formula(size, shape, itemsize)
        return self.formulas[key]

    def _formula(self, size: sympy.Expr, shape: list[sympy.Expr], itemsize: int) -> str:
        dims = [self._alias(d) for d in shape]
        if size != itemsize * sympy.prod(shape) or (len(shape) == 1 and shape[0].args):
            if not (isinstance(size, FloorDiv) and size.args[1].is_number):
                return self._shorten(size)
            base, divisor = size.args
            return f"ceil({self._shorten(base - (divisor - 1))}/{divisor})"
        number = itemsize * sympy.prod([d for d in dims if d.is_number])
        rest = [str(d) if d.is_Symbol else f"({self._text(d)})" for d in dims if not d.is_number]
        return "*".join([str(number), *rest])

    def _shorten(self, e: sympy.Expr) -> str:
        """The expression with positions under their short names, factored where that is cheap."""
        if _linear(e):
            number, rest = e.primitive()
            return f"{number}*({rest})" if number != 1 else str(rest)
        longest = sorted(self.aliases.items(), key=lambda kv: -len(self._text(kv[0])))
        e = sympy.factor(e.xreplace({FloorDiv(*p.args[:2]): a for p, a in longest if isinstance(p, FloorDiv)}))
        for position, alias in longest:
            e = e.subs(position, alias)
        return str(e)

    @cached_property
    def pinned(self) -> list[str]:
        """Symbols that the run turned into numbers."""
        values = ((ours, self.expr_of(theirs)) for theirs, ours in self.fakes.names.items())
        return [f"{ours.name} = {value}" for ours, value in values if value.is_number]

    @cached_property
    def pinned_widths(self) -> dict[str, int]:
        """Widths that the run turned into numbers, and these."""
        pairs = (p.split(" = ") for p in self.pinned if p.startswith("C"))
        return {name: int(value) for name, value in pairs}

    @cached_property
    def positions_known(self) -> bool:
        """Whether every position of the inputs is a symbol still."""
        sizes = [n for t in tensors_in(self.fakes.inputs) for n in t.shape[2:]]
        plain = any(isinstance(n, int) and n > 1 for n in sizes)
        return not plain and not any(p[0] in _POSITION for p in self.pinned)

    def values(self) -> dict[str, int]:
        """Every name used, with its value at the sizes asked for."""
        return {**self.fakes.values, **{a.name: self.at(e) for e, a in self.aliases.items()}}

    def guards(self) -> list[sympy.Expr]:
        """The guards that the run added, in our symbols."""
        found = [both_sides(lambda x: x.xreplace(self.fakes.names), e) for e in self._guards]
        return [e for e in dict.fromkeys(found) if e not in (sympy.true, True)]

    def assumptions(self) -> tuple[str, ...]:
        """What the run took for granted: symbols pinned to numbers, and guards on sizes."""
        out = [f"{p} (pinned by the model)" for p in self.pinned]
        maps = 0
        for e in self.guards():
            small = isinstance(e, sympy.core.relational.Relational) and any(a in (1, 2) for a in e.args)
            if not isinstance(e, sympy.Eq) and (small or all(self.is_position(x) for x in e.free_symbols)):
                maps += 1
            elif not (isinstance(e, sympy.Eq) and any(a.is_number for a in e.args)):
                out.append(str(e))
        if maps:
            out.append(f"positions stay on this side of {maps} size guards (maps larger than one element)")
        return tuple(out)


def _linear(e: sympy.Expr) -> bool:
    """Whether an expression is a sum of widths, each a number of times."""
    terms = (a.as_coeff_Mul()[1] for a in e.args)
    return e.is_Add and all(t.is_Symbol and t.name[0] == "C" for t in terms)
