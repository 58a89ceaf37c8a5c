"""Placements: no overlap, never below the bound, close to it on real timelines, and the same every time."""

import itertools
from collections.abc import Sequence
from typing import Any

import backbones
import hard_models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from floorplan.cost_models import arena_search
from floorplan.cost_models.arena import Interval, Placement, place, verify
from floorplan.errors import FloorplanError
from floorplan.graph import driver
from floorplan.graph.trace import trace
from floorplan.ledger.run import Step, run
from floorplan.methods.catalogue import Options, method

block = st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 2000)).map(lambda t: (t[0], t[0] + t[1], t[2]))


def meet(a: Interval, b: Interval) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def overlaps(intervals: Sequence[Interval], offsets: Sequence[int]) -> bool:
    """By brute force over all pairs."""
    pairs = itertools.combinations(zip(intervals, offsets, strict=True), 2)
    return any(meet(a, b) and p < q + b[2] and q < p + a[2] for (a, p), (b, q) in pairs if a[2] and b[2])


def most(intervals: Sequence[Interval], alignment: int) -> int:
    """Max-live by looking at every step."""
    steps = {born for born, _, _ in intervals}
    return max((sum(-(-n // alignment) * alignment for b, d, n in intervals if b <= t < d) for t in steps), default=0)


def optimum(intervals: Sequence[Interval]) -> int:
    """The smallest arena, by first fit in every order: one of them is optimal."""
    best = sum(n for _, _, n in intervals)
    for order in itertools.permutations(intervals):
        put: list[tuple[Interval, int]] = []
        for b in order:
            below = sorted((at, at + o[2]) for o, at in put if meet(o, b))
            at = 0
            for low, high in below:
                if low - at >= b[2]:
                    break
                at = max(at, high)
            put.append((b, at))
        best = min(best, max((at + b[2] for b, at in put), default=0))
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(block, max_size=40), st.sampled_from([1, 64, 512]))
def test_no_overlap_and_never_below_the_bound(blocks: list[Interval], alignment: int) -> None:
    p = place(blocks, alignment=alignment, seconds=0.02)
    verify(blocks, p)
    assert not overlaps(blocks, p.offsets)
    assert all(at % alignment == 0 for at in p.offsets)
    assert all(at + n <= p.size for at, (born, died, n) in zip(p.offsets, blocks, strict=True) if born < died)
    assert p.bound == most(blocks, alignment) <= p.size and p.raw_bound == most(blocks, 1) <= p.bound
    assert p.ratio >= 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(block, min_size=1, max_size=6))
def test_tiny_instances_are_placed_optimally(blocks: list[Interval]) -> None:
    real = [b for b in blocks if b[2] and b[1] > b[0]]
    assert place(blocks, alignment=1, seconds=0.5).size == optimum(real)


@settings(max_examples=100, deadline=None)
@given(st.lists(block, min_size=2, max_size=8), st.lists(st.integers(0, 60), min_size=8, max_size=8))
def test_the_verifier_agrees_with_brute_force(blocks: list[Interval], at: list[int]) -> None:
    offsets = tuple(64 * o for o in at[: len(blocks)])
    size = 8192  # room for all
    given_ = Placement(offsets, size, most(blocks, 64), "by hand")
    if overlaps(blocks, offsets):
        with pytest.raises(FloorplanError, match=r"blocks \d+ and \d+: both hold bytes"):
            verify(blocks, given_)
    else:
        verify(blocks, given_)


def test_the_verifier_names_the_two() -> None:
    two = [(0, 4, 100), (2, 6, 64), (4, 9, 128)]
    verify(two, Placement((0, 128, 0), 192, 192, "by hand"))
    with pytest.raises(FloorplanError, match="blocks 0 and 1: both hold bytes 64 to 100 at step 2"):
        verify(two, Placement((0, 64, 128), 256, 192, "by hand"))


@pytest.mark.parametrize(
    "offsets, size, bound, what",
    [
        ((0,), 256, 192, "1 offsets for 2"),
        ((0, 130), 256, 192, "block 1 at 130"),
        ((0, -64), 256, 192, "block 1 at -64"),
        ((0, 128), 160, 192, "block 1 at 128"),
        ((0, 128), 192, 128, "bound 128"),
    ],
)
def test_what_else_the_verifier_refuses(offsets: Any, size: int, bound: int, what: str) -> None:
    with pytest.raises(FloorplanError, match=what):
        verify([(0, 4, 100), (2, 6, 64)], Placement(offsets, size, bound, "by hand"))


@pytest.mark.parametrize("blocks", [[(3, 2, 8)], [(0, 2, -1)]])
def test_impossible_blocks_are_refused(blocks: list[Interval]) -> None:
    with pytest.raises(FloorplanError, match="block 0"):
        place(blocks)


def test_impossible_alignment_is_refused() -> None:
    with pytest.raises(FloorplanError, match="alignment 0"):
        place([(0, 1, 8)], alignment=0)


def test_nothing_to_place() -> None:
    for blocks in ([], [(0, 4, 0), (2, 2, 99)]):
        p = place(blocks)
        verify(blocks, p)
        assert (p.size, p.bound, p.ratio, set(p.offsets)) == (0, 0, 1.0, {0} if blocks else set())


def test_moves_reach_what_no_greedy_rule_does() -> None:
    blocks = timeline_of(*hard_models.build("dense-concatenation"), rewritten=True)
    greedy, moved = place(blocks, seconds=0), place(blocks)
    assert moved.size == moved.bound < greedy.size and place(blocks) == moved


def test_sections_keep_who_meets_whom() -> None:
    rng = np.random.RandomState(0)
    for _ in range(20):
        born = rng.randint(0, 30, 25)
        died = born + rng.randint(1, 12, 25)
        b = arena_search.Blocks.of(born.tolist(), died.tolist(), [1] * 25)
        for i, j in itertools.combinations(range(25), 2):
            apart = died[i] <= born[j] or died[j] <= born[i]
            assert apart == (b.last[i] <= b.first[j] or b.last[j] <= b.first[i])
        assert b.live.max() == most([(int(x), int(y), 1) for x, y in zip(born, died, strict=True)], 1)


def timeline_of(model: nn.Module, inputs: tuple[Tensor, ...], rewritten: bool = False) -> list[Interval]:
    """(born, died, bytes) of every storage of a step, on fake tensors."""
    traced = trace(model.eval() if rewritten else model, inputs, both_modes=rewritten)
    gm = traced.gm
    if rewritten:
        gm = driver.rewrite(gm, method("memflora").passes(Options(2)), lambda *_: None)[0].train()
    line = run(Step(gm, inputs)).timeline
    return [(v.born, line.events if v.died is None else v.died, int(v.nbytes)) for v in line.lives]


def near(blocks: list[Interval]) -> None:
    p = place(blocks)
    verify(blocks, p)
    assert p.size <= 1.002 * p.bound, f"{p.ratio} by {p.order}"


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("name", ["mobilenet_v2", "t_resnet"])
def test_backbones_fit_the_bound(name: str, rewritten: bool) -> None:
    shape = (64, 97, 60) if name == "t_resnet" else (64, 1, 97, 60)
    near(timeline_of(getattr(backbones, name)(), (torch.zeros(shape),), rewritten))


NO_STEP = ("branch-on-values", "in-place-add-after-relu")
HARD = [n for n in hard_models.HARD if n not in NO_STEP]


@pytest.mark.parametrize("name", HARD)
def test_hard_models_fit_the_bound(name: str) -> None:
    near(timeline_of(*hard_models.build(name)))


@pytest.mark.parametrize("name", ["dense-concatenation", "zero-and-negative-variance", "conv-lstm", "depthwise"])
def test_rewritten_hard_models_fit_the_bound(name: str) -> None:
    near(timeline_of(*hard_models.build(name), rewritten=True))


def test_thousands_of_blocks() -> None:
    rng = np.random.RandomState(1)
    born = np.arange(5000)
    life = np.where(rng.rand(5000) < 0.4, 10000 - 2 * born, rng.randint(1, 9, 5000)).clip(1)
    size = rng.choice([256, 4096, 1 << 18, 1 << 20], 5000)
    blocks = [(int(b), int(b + n), int(s)) for b, n, s in zip(born, life, size, strict=True)]
    p = place(blocks, seconds=0)
    verify(blocks, p)
    assert p.ratio < 1.05
