"""Computed sizes get short names, and what they are is put back at the end."""

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hard_nets import Lambda, Norm, same
from kinds import images
from torch import Tensor, nn

import floorplan
from floorplan.graph.trace import trace
from floorplan.ledger.fakes import Fakes, Sizes, symbolic_fakes
from floorplan.ledger.names import Namer
from floorplan.ledger.run import Run, Step, Watch, run
from floorplan.ledger.sizes import Sized
from floorplan.torch_doors import FloorDiv

X = images(4, 3, 12, 10)


def deep(m: Any, x: Tensor) -> Any:
    """Strides and concatenations, one upon another."""
    y = F.silu(m.a(x))
    y = torch.cat([y, F.silu(m.b(y)), y], 1)
    return m.c(F.silu(m.down(y)))


def net() -> nn.Module:
    return Lambda(deep, a=same(3, 5, stride=2), b=same(5, 7), down=same(17, 6, stride=2), c=same(6, 4))


def symbolic(model: nn.Module, x: Tensor = X) -> tuple[Fakes, Run]:
    fakes = symbolic_fakes(trace(model, (x,)).gm, (x,), Sizes("primes"))
    return fakes, run(Step(fakes.gm, (x,), backward=False), Watch(hooks=True), fakes)


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


@pytest.mark.parametrize("k", [2, 7])
def test_a_size_padded_to_a_multiple_is_that_multiple(k: int) -> None:
    def windows(m: Any, x: Tensor) -> Any:
        y = F.pad(m.a(x), (0, 0, 0, (k - x.shape[2] % k) % k))
        return F.silu(y.view(y.shape[0], y.shape[1], y.shape[2] // k, k, y.shape[3]))

    fakes, _ = symbolic(Lambda(windows, a=same(3, 5)))
    assert isinstance(fakes.env, Sized)
    (height,) = fakes.env.defined.values()
    (x,) = height.free_symbols
    assert height == FloorDiv(x + k - 1, k)


class Dense(nn.Module):
    """n layers, each reading all maps before it."""

    def __init__(self, n: int, width: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(8 + i * width) for i in range(n))
        self.convs = nn.ModuleList(same(8 + i * width, width) for i in range(n))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            maps.append(conv(norm(torch.cat(maps, 1))))
        return torch.cat(maps, 1)


def test_no_comparison_of_a_run_grows_with_its_depth() -> None:
    longest = []
    for n in (4, 12):
        env: Any = symbolic(Dense(n), images(4, 8, 12, 12))[0].env
        longest.append(max(len(list(sympy.preorder_traversal(g.expr))) for g in env.guards))
    assert longest[1] <= longest[0] + 2


def test_widths_of_concatenations_are_written_as_sums_of_the_models_own() -> None:
    report = floorplan.check(Dense(3), images(4, 8, 12, 12))
    sums = [a for a in report.proof.assumptions if a.startswith("Eq(C")]
    assert sums == ["Eq(C2, C1 + C4)", "Eq(C3, C1 + 2*C4)"]
    assert "4*B*(C1 + C4)*H0*W0" in {e.expr for e in report.proof.kept}


def test_equal_positions_on_two_ways_have_one_name() -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        return m.c2(m.c1(x)) + m.down(x)  # type: ignore[no-any-return]

    half: dict[str, Any] = {"stride": 2}
    model = Lambda(
        both,
        c1=nn.Conv2d(3, 8, 3, padding=1, **half),
        c2=nn.Conv2d(8, 8, 3, padding=1, **half),
        down=nn.Conv2d(3, 8, 1, stride=4),
    )
    env: Any = symbolic(model, images(4, 3, 24, 24))[0].env
    assert len(env.defined) == 4 and len(set(env.defined.values())) == 4  # halved and quartered, each way once


def test_names_are_taken_to_be_two_or_more_and_that_is_said() -> None:
    model = Lambda(lambda m, x: m.c1(x), c1=nn.Conv2d(3, 8, 3, stride=2, padding=1))
    said = Namer(symbolic(model, images(4, 3, 24, 24))[0]).assumptions()
    assert any(a.startswith("positions stay on this side of 2 size guards") for a in said)
