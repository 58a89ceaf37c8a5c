"""Rounding rules, and the caching allocator's own rules by hand, at random, and on a device if there is one."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floorplan.cost_models.allocators import MIB, aligned, cuda_caching, cuda_round, exact, peak, segment_size
from floorplan.errors import FloorplanError

KIB = 1024
block = st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 30 * MIB)).map(
    lambda t: (t[0], t[0] + t[1], t[2])
)


def test_rounding() -> None:
    assert [exact(n) for n in (0, 1, 513)] == [0, 1, 513]
    assert [cuda_round(n) for n in (0, 1, 512, 513, 1024)] == [0, 512, 512, 1024, 1024]
    assert [aligned(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_peak_of_rounded_sizes() -> None:
    line = [(0, 3, 100), (1, 2, 600), (2, 4, 1), (5, 6, 700)]
    assert peak(line) == 700 and peak([]) == 0
    assert peak(line, cuda_round) == 512 + 1024
    assert peak([(0, 1, 5), (1, 2, 7)]) == 7  # the first is gone when the second comes


@pytest.mark.parametrize(
    "size, segment",
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size) == segment
    assert cuda_caching([(0, 1, size)])[1] == segment


def test_small_requests_share_a_segment() -> None:
    assert cuda_caching([(i, 10, 512 * KIB) for i in range(4)]) == (2 * MIB, 2 * MIB)
    assert cuda_caching([(i, 10, 512 * KIB) for i in range(5)]) == (5 * MIB // 2, 4 * MIB)


def test_a_large_remainder_of_a_megabyte_is_not_split_off() -> None:
    assert cuda_caching([(0, 1, 11 * MIB)]) == (12 * MIB, 12 * MIB)
    assert cuda_caching([(0, 1, 11 * MIB - 512)]) == (11 * MIB - 512, 12 * MIB)


def test_best_fit_not_first_fit() -> None:
    line = [(0, 4, 30 * MIB), (1, 5, 12 * MIB), (6, 9, 12 * MIB), (7, 9, 30 * MIB)]
    assert cuda_caching(line) == (42 * MIB, 42 * MIB)  # the 12 goes where 12 was, so that the 30 fits again


def test_free_neighbours_join() -> None:
    thirds = [(0, 3, 6 * MIB), (1, 3, 6 * MIB), (2, 4, 6 * MIB)]
    assert cuda_caching([*thirds, (5, 6, 9 * MIB)]) == (18 * MIB, 20 * MIB)
    assert cuda_caching([*thirds, (3, 6, 9 * MIB)])[1] == 20 * MIB  # two freed thirds
    apart = [(0, 3, 6 * MIB), (1, 9, 6 * MIB), (2, 3, 6 * MIB)]
    assert cuda_caching([*apart, (4, 6, 9 * MIB)])[1] == 40 * MIB  # 6 and 8 free, not together


def test_segments_do_not_join() -> None:
    assert cuda_caching([(0, 2, 10 * MIB), (1, 2, 10 * MIB), (3, 4, 20 * MIB)]) == (20 * MIB, 40 * MIB)


def test_pools_do_not_mix() -> None:
    assert cuda_caching([(0, 1, MIB), (2, 3, 2 * MIB)])[1] == 22 * MIB


@settings(max_examples=200, deadline=None)
@given(st.lists(block, max_size=30))
def test_between_rounding_and_reserved(line: list[tuple[int, int, int]]) -> None:
    allocated, reserved = cuda_caching(line)
    assert peak(line) <= peak(line, cuda_round) <= allocated <= reserved
    assert allocated <= peak(line, lambda n: n if not n else cuda_round(n) + MIB)
    assert reserved % (2 * MIB) == 0


def test_freeing_all_leaves_whole_segments() -> None:
    rng = random.Random(0)
    line = [(i, i + rng.randint(1, 40), rng.choice([700, 90_000, 3 * MIB, 14 * MIB])) for i in range(300)]
    reserved = cuda_caching(line)[1]
    assert cuda_caching([*line, *[(b + 1000, d + 1000, n) for b, d, n in line]])[1] == reserved


@pytest.mark.parametrize("call", [peak, cuda_caching])
def test_impossible_blocks_are_refused(call: object) -> None:
    with pytest.raises(FloorplanError, match="block 0"):
        call([(3, 2, 8)])  # type: ignore[operator]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_against_the_device() -> None:
    rng = random.Random(1)
    line = [(i, i + rng.randint(1, 30), rng.choice([700, 90_000, 3 * MIB, 14 * MIB])) for i in range(200)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    alive: dict[int, torch.Tensor] = {}
    for step in range(231):
        for i in [i for i in alive if line[i][1] == step]:
            del alive[i]
        if step < len(line):
            alive[step] = torch.empty(line[step][2], dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_allocated() - before == cuda_caching(line)[0]
    if kept == 0:
        assert torch.cuda.max_memory_reserved() == cuda_caching(line)[1]
