"""Symbolic sizes that stay short: a computed size gets a symbol of its own, and its definition is put back at the end.

    conv      (H0 - 1)//2 + 1   ->   s1
    cat       C1 + C4 + C4      ->   s2 + C4  ->  s3

Every comparison that a run makes is then one of products of symbols, however deep the model is and however many
maps it concatenates. Written out, a size of the last layer would be multiplied out at each of its comparisons.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic

from floorplan.errors import TraceError
from floorplan.torch_doors import ConstantSource, FloorDiv, Mod, SymbolEnv, directly, schema_of

TOO_LONG = "the sizes that it compares are expressions too long for a symbolic run"
_LONG, _MOST = 30, 150  # parts of an expression that is long; those of all long ones at which a run is given up


class Sized(SymbolEnv):
    """Names computed sizes, each taken to be 2 or more; nothing is learned of a name but what its definition says."""

    def __init__(self) -> None:
        super().__init__(duck_shape=True)
        self.defined: dict[sympy.Symbol, sympy.Expr] = {}  # name -> its size, in symbols of the model
        self.equal: dict[sympy.Symbol, sympy.Expr] = {}  # a width of the model -> the sum that it was compared with
        self._by_size: dict[sympy.Expr, Any] = {}
        self._compared: set[Any] = set()
        self._long = 0

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer a comparison; a run whose comparisons get longer and longer would not end."""
        if orig_expr not in self._compared:
            self._compared.add(orig_expr)
            parts = sum(1 for _ in sympy.preorder_traversal(orig_expr))
            self._long += parts if parts > _LONG else 0
            if self._long > _MOST:
                raise TraceError(TOO_LONG)
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def replaces(self, symbol: sympy.Symbol, value: sympy.Expr) -> bool:
        """Names stay what they are defined as."""
        return not self.defined.keys() & {symbol, *value.free_symbols}

    def written_out(self, e: sympy.Expr) -> sympy.Expr:
        """An expression without names, with what the run learned about the symbols of the model."""
        return self.replace(e.xreplace(self.defined)).xreplace(self.equal)

    def named(self, size: Any) -> Any:
        """A size as a product of symbols and names."""
        if not isinstance(size, torch.SymInt) or _is_product(size.node.expr):
            return size
        e = _padded(size.node.expr)
        return prod(self._name(f) for f in (e.args if e.is_Mul else (e,)))

    def _name(self, e: sympy.Expr) -> Any:
        """A name for a factor of a size; itself where it has one or needs none."""
        whole = e if e.is_Symbol or e.is_number else e.xreplace(self.defined)
        if whole not in self._by_size:
            plain = whole.is_Symbol or whole.is_number
            size: Any = self.create_symintnode(whole if plain else e, hint=None)
            hint = _hints([size])[0]
            if plain or hint in (0, 1):
                return size
            symbol = self.create_symbol(hint, ConstantSource(f"size_{len(self.defined)}"), DimDynamic.DYNAMIC)
            self.defined[symbol] = whole
            self._by_size[whole] = cast(torch.SymInt, self.create_symintnode(symbol, hint=hint))
        return self._by_size[whole]

    def learned(self) -> list[sympy.Expr]:
        """The guards of a run, written out; what they say about the model's symbols is learned on the way."""
        names, found = self.defined.keys(), []
        for e in (g.expr for g in self.guards):
            if e.free_symbols & names:
                e = both_sides(self.written_out, e)
                if isinstance(e, sympy.Eq):
                    self._learn(e)
                elif isinstance(e, sympy.Ge) and e.args[1] == 2 and _two_or_more(e.args[0]) or self.decided(e):
                    continue
            found.append(e)
        asked = [e >= 2 for e in map(self.written_out, names) if not _two_or_more(e)]
        return [*found, *(e for e in asked if not self.decided(e))]

    def _learn(self, e: sympy.Eq) -> None:
        """A width that is a sum of others is written as the sum from now on."""
        for width, total in (e.args, e.args[::-1]):
            if width.is_Symbol and total.is_Add and width not in total.free_symbols:
                self.equal[width] = total


def both_sides(f: Callable[[sympy.Expr], sympy.Expr], e: sympy.Expr) -> sympy.Expr:
    """A guard with f of what it compares; sympy need not decide an equation anew, which is slow for long sums."""
    if not isinstance(e, sympy.Eq):
        return f(e)
    a, b = map(f, e.args)
    return sympy.true if a == b else sympy.Eq(a, b, evaluate=False)


def _two_or_more(e: sympy.Expr) -> bool:
    """Whether this is a sum of the model's sizes, each 1 or more."""
    return e.is_Add and all(a.is_Symbol and a.is_positive for a in e.args)


def _is_product(e: sympy.Expr) -> bool:
    return e.is_Symbol or e.is_number or (e.is_Mul and all(a.is_Symbol or a.is_number for a in e.args))


def _padded(e: sympy.Expr) -> sympy.Expr:
    """A size that is padded to a multiple of a number, x + (-x mod k), as that multiple: k * ((x + k - 1) // k)."""
    for mod in e.args if e.is_Add else ():
        if isinstance(mod, Mod) and mod.args[1].is_number:
            x, (more, k) = e - mod, mod.args
            total = (x + more).replace(Mod, lambda a, b: a - b * FloorDiv(a, b))
            if sympy.expand(total / k).is_integer:
                return k * FloorDiv(x + k - 1, k)
    return e


def with_names(func: Any, out: Any) -> Any:
    """What an op made, the computed sizes of new tensors named."""
    if isinstance(out, tuple | list):
        return type(out)(with_names(func, t) for t in out)
    env = getattr(getattr(out, "fake_mode", None), "shape_env", None)
    if not isinstance(env, Sized) or any(r.alias_info is not None for r in schema_of(func).returns):
        return out
    sizes = [env.named(n) for n in out.shape]
    if all(a is b for a, b in zip(sizes, out.shape, strict=True)):
        return out
    hints, strides = _hints(out.shape), _hints(out.stride())
    for layout in _LAYOUTS.get(out.dim(), (torch.contiguous_format,)):
        if _strides(hints, layout) == strides:
            return made(out, sizes, layout)
    return out


_LAYOUTS = {4: (torch.contiguous_format, torch.channels_last), 5: (torch.contiguous_format, torch.channels_last_3d)}


def _strides(hints: list[int], layout: torch.memory_format) -> list[int]:
    order = list(range(len(hints))) if layout == torch.contiguous_format else [0, *range(2, len(hints)), 1]
    found, stride = [0] * len(hints), 1
    for i in reversed(order):
        found[i], stride = stride, stride * hints[i]
    return found


def viewed(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a view, the sizes that it asks for named."""
    env = getattr(getattr(args[0], "fake_mode", None), "shape_env", None)
    return (args[0], [env.named(n) for n in args[1]]) if isinstance(env, Sized) else args


def concatenated(tensors: Sequence[Any], dim: int = 0) -> Any:
    """torch.cat of contiguous maps with one dtype, without a comparison of sizes for each; None for others."""
    first, hints = tensors[0], [_hints(t.shape) for t in tensors]
    env = getattr(getattr(first, "fake_mode", None), "shape_env", None)
    pairs = zip(tensors, hints, strict=True)
    plain = all(t.dtype == first.dtype and _hints(t.stride()) == _strides(h, torch.contiguous_format) for t, h in pairs)
    if not isinstance(env, Sized) or not plain or first.dim() != 4 or dim != 1:
        return None
    exprs = [[n.node.expr if isinstance(n, torch.SymInt) else n for n in t.shape] for t in tensors]
    if any((e[0], *e[2:]) != (exprs[0][0], *exprs[0][2:]) for e in exprs):
        return None
    size = sympy.Add(*(e[1] for e in exprs))
    width = env.create_symintnode(size, hint=sum(h[1] for h in hints))
    return made(first, [first.shape[0], env.named(width), *first.shape[2:]])


def made(like: Any, sizes: Sequence[Any], layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A new fake of these sizes, of the other's type and on its device."""
    return directly(like, torch.empty, sizes, dtype=like.dtype, device="meta", memory_format=layout)


def made_like(x: Any) -> Tensor:
    """torch.empty_like of a fake."""
    if _hints(x.stride()) != _strides(_hints(x.shape), torch.contiguous_format):
        return torch.empty_like(x)
    return directly(x, torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device="meta")


def _hints(sizes: Sequence[Any]) -> list[int]:
    nodes = (getattr(n, "node", None) for n in sizes)
    return [int(n) if node is None else int(node.hint) for n, node in zip(sizes, nodes, strict=True)]
