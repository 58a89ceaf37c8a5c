"""What a model's own code asks of sizes: one run of the module on fakes whose batch and positions are symbols.

if x.shape[0] > 16:        ->   B > 16 is False, asked at net.py:12
for i in range(len(x)):    ->   B is made a number at net.py:13
f"{x.shape[0]}"            ->   B is made a text at net.py:14
x.split(32)                ->   B is taken apart at net.py:15
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from floorplan.errors import first_line
from floorplan.graph.copies import clone_structure, replace_tensors
from floorplan.graph.decide import place
from floorplan.graph.untouched import no_memory
from floorplan.ledger.fakes import DYNAMIC, STATIC, Fakes
from floorplan.ledger.points import Answer, Axes, Point
from floorplan.ledger.recorder import Saved
from floorplan.ledger.run import Step, Watch, run
from floorplan.ledger.sizes import Sized
from floorplan.torch_doors import ConstantSource, FakeTensorMode, sizes_as_text, tensors_in, tree_map

_TORCH, _OURS = (str(Path(f).parent) for f in (torch.__file__, Path(__file__).parent))
_ASKED_BY = tuple(str(Path(torch.__file__).parent / p) for p in ("fx/experimental", "__init__.py", "utils/_sympy"))


@dataclass(frozen=True)
class Heard:
    """The questions of one run, in order, and why it ended early if it did."""

    answers: tuple[Answer, ...]
    numbers: tuple[str, ...]  # "net.py:13 makes a number of B"
    failed: str = ""
    saved: tuple[Saved, ...] = ()  # what the run kept, if it was asked


class _Asked(Sized):
    """Notes the comparisons and numbers that code outside torch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[sympy.Expr, Any, str]] = []

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """The answer, as ever."""
        written = orig_expr.xreplace(self.defined) if isinstance(orig_expr, sympy.Basic) else None
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if written is not None and written.free_symbols and (where := _asker()):
            self.asked.append((written, answer, where))
        return answer


def _asker() -> str:
    """`file.py:12` of the code that asks, if it is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_ASKED_BY, __file__, "<")):
        frame = frame.f_back
    return "" if frame.f_code.co_filename.startswith((_TORCH, _OURS)) else place(frame)


class _Pieces(TorchFunctionMode):
    """Notes where a tensor is taken apart into as many pieces as its batch or positions make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[sympy.Expr, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _TAKES_APART and isinstance(out, tuple | list | Iterator):
            given = dict(zip(("self", "of", "dim"), args, strict=False)) | (kwargs or {})
            x = given.get("self", given.get("tensor", given.get("input")))
            dim = given.get("dim", given.get("of") if func.__name__ == "unbind" else None) or 0
            size = getattr(getattr(x.shape[dim], "node", None), "expr", None) if isinstance(x, Tensor) else None
            if size is not None and size.free_symbols:
                self.seen.append((size, _user_line()))
        return out


_TAKES_APART = {"split", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk", "__iter__"}


def _user_line() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    return place(frame) if frame is not None else "the forward"


def heard(step: Step, axes: Axes, point: Point, hooks: bool = False) -> Heard:
    """What the model's code asks at a point; hooks: and what it keeps."""
    fakes, symbols, env = _asking(step.model, step.inputs, axes, point)
    failed, saved, pieces, texts = "", tuple[Saved, ...](), _Pieces(), list[tuple[sympy.Expr, str]]()

    def as_text(size: Any) -> None:
        frame = sys._getframe(2)  # torch writes sizes as text for itself
        if not frame.f_code.co_filename.startswith(_TORCH) and size.node.expr.free_symbols:
            texts.append((size.node.expr, place(frame)))

    try:
        with no_memory(step.model), pieces, sizes_as_text(as_text):
            saved = run(step.forward, Watch(hooks=hooks, nodes=False), fakes).saved
    except Exception as e:  # whatever its code raises on symbols
        failed = first_line(e)
    answers, numbers = [], []
    for how, found in (("a text", texts), ("pieces", pieces.seen)):
        numbers += [f"{where} makes {how} of {e.xreplace(env.defined).xreplace(symbols)}" for e, where in found]
    for written, answer, where in env.asked:
        relation = written.xreplace(symbols)
        if not relation.free_symbols:
            continue
        if answer in (sympy.true, sympy.false, True, False) and isinstance(relation, sympy.logic.boolalg.Boolean):
            answers.append((relation, bool(answer)))
        else:
            numbers.append(f"{where} makes a number of {relation}")
    return Heard(tuple(dict.fromkeys(answers)), tuple(dict.fromkeys(numbers)), failed, saved)


def _asking(
    model: nn.Module, inputs: Sequence[Any], axes: Axes, point: Point
) -> tuple[Fakes, dict[sympy.Symbol, sympy.Symbol], _Asked]:
    """The module on fakes, batch and positions symbols with the values of the point; widths are numbers."""
    env = _Asked()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False
    twin = clone_structure(model)
    replace_tensors(twin, lambda name, t, m: mode.from_tensor(t.detach(), static_shapes=True))
    symbols: dict[sympy.Symbol, sympy.Symbol] = {}
    numbers = iter(range(len(list(tensors_in(tuple(inputs))))))

    def of(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        k = next(numbers)
        kinds = [DYNAMIC if (k, i) in axes.names and n > 1 else STATIC for i, n in enumerate(t.shape)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(t.detach(), symbolic_context=context, source=ConstantSource(f"input_{k}"))
        for i, n in enumerate(fake.shape):
            expr = getattr(getattr(n, "node", None), "expr", None)
            if isinstance(expr, sympy.Symbol) and (k, i) in axes.names:
                symbols[expr] = sympy.Symbol(axes.names[k, i], positive=True, integer=True)
        return fake.requires_grad_(t.requires_grad)

    given = tuple(tree_map(of, axes.at(tuple(inputs), point)))
    return Fakes(mode, twin, given, symbols, {}, {}, env), symbols, env
