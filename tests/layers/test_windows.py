"""The ops of packed max pools: a few samples at a time, without seams and without a whole index map."""

import pytest
import torch
from saves import same
from torch import nn

from floorplan.layers.pools import compact_pool
from floorplan.layers.windows import max_pool


def test_max_pool_chunks_join_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floorplan.layers.windows.CHUNK", 1)
    for kernel in (2, 3):  # 75 offsets a sample: no whole byte
        pool = nn.MaxPool2d(kernel, 2, 1)
        same(pool, compact_pool(pool), torch.randn(7, 3, 9, 9, dtype=torch.float64))


def test_max_pool_holds_no_whole_index_map() -> None:
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(64, 8, 64, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        y, packed = max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1], False, 2)
    now = peak = 0
    for event in p.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert y.nbytes + packed.nbytes <= peak < y.nbytes + packed.nbytes + 8 * y.numel()
