"""Computed sizes get short names, and what they are is put back at the end."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hard_nets import Lambda, same
from kinds import images
from torch import Tensor, nn

from floorplan.graph.trace import trace
from floorplan.ledger.fakes import Fakes, Sizes, symbolic_fakes
from floorplan.ledger.names import Namer
from floorplan.ledger.run import Run, Step, Watch, run
from floorplan.ledger.sizes import Sized

X = images(4, 3, 12, 10)


def deep(m: Any, x: Tensor) -> Any:
    """Strides and concatenations, one upon another."""
    y = F.silu(m.a(x))
    y = torch.cat([y, F.silu(m.b(y)), y], 1)
    return m.c(F.silu(m.down(y)))


def net() -> nn.Module:
    return Lambda(deep, a=same(3, 5, stride=2), b=same(5, 7), down=same(17, 6, stride=2), c=same(6, 4))


def symbolic(model: nn.Module) -> tuple[Fakes, Run]:
    fakes = symbolic_fakes(trace(model, (X,)).gm, (X,), Sizes("primes"))
    return fakes, run(Step(fakes.gm, (X,), backward=False), Watch(hooks=True), fakes)


def short(n: Any) -> bool:
    """Whether a size is a number or a product of symbols."""
    if not isinstance(n, torch.SymInt):
        return True
    e = n.node.expr
    return bool(e.is_Symbol or e.is_number or (e.is_Mul and all(a.is_Symbol or a.is_number for a in e.args)))


def test_sizes_of_a_run_are_short_and_written_out_at_the_end() -> None:
    fakes, found = symbolic(net())
    assert isinstance(fakes.env, Sized) and fakes.env.defined
    kept = [s for s in found.saved if s.owner == "kept"]
    assert kept and all(short(n) for s in kept for n in s.shape)
    namer = Namer(fakes)
    symbols = {x for s in kept for n in s.shape for x in namer.expr(n).free_symbols}
    assert symbols and not symbols & fakes.env.defined.keys()
    real = run(Step(trace(net(), (X,)).gm, (X,), backward=False), Watch(hooks=True), fake=False)
    shapes = [tuple(namer.at(namer.expr(n)) for n in s.shape) for s in kept]
    assert shapes == [tuple(s.shape) for s in real.saved if s.owner == "kept"]


def test_a_concatenation_is_as_wide_as_its_parts() -> None:
    fakes, found = symbolic(net())
    namer = Namer(fakes)
    widths = {namer.expr(s.shape[1]) for s in found.saved if s.owner == "kept"}
    (joined,) = [w for w in widths if namer.at(w) == 5 + 7 + 5]
    assert joined.is_Add and len(joined.free_symbols) == 2 and namer.pinned_widths == {}


@pytest.mark.parametrize("size", [3, 1])
def test_a_number_needs_no_name(size: int) -> None:
    env = Sized()
    assert env.named(size) == size and not env.defined and env.learned() == []
