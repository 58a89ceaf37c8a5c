"""Operations are timed on this machine, each kind fits a roofline of its own, and the error is stated."""

from unittest import mock

import pytest
import torch

from floorplan.budget import machine
from floorplan.budget.machine import by_kind, timings
from floorplan.errors import FloorplanError


@pytest.fixture(scope="module")
def found() -> list[machine.Timed]:
    torch.manual_seed(0)
    return timings("cpu", seconds=0.3)


def test_every_kind_is_timed(found: list[machine.Timed]) -> None:
    convs, layouts = ("pointwise", "dense", "depthwise"), ("contiguous", "channels_last")
    kinds = [f"{k}, {layout}" for k in convs for layout in layouts]
    assert {t.kind for t in found} == {*kinds, "clamp", "pack", "apply"}
    assert all(0 < t.seconds < 10 and t.flops > 0 and t.moved > 0 for t in found)
    assert len({(t.kind, t.name) for t in found}) == len(found)


def test_work_is_counted(found: list[machine.Timed]) -> None:
    at = {(t.kind, t.name): t for t in found}
    dense = at["dense, contiguous", "64->64 3x3 on 28"]
    assert dense.flops == 2 * 4 * 28 * 28 * 64 * 64 * 9
    assert dense.moved == 4 * (2 * 4 * 64 * 28 * 28 + 64 * 64 * 9)
    assert at["depthwise, contiguous", "96->96 3x3 on 48"].flops == 2 * 8 * 48 * 48 * 96 * 9
    assert at["pack", "1048576 elements"].moved == (1 << 20) * 4 + (1 << 17)


def test_fits(found: list[machine.Timed]) -> None:
    with mock.patch.object(machine, "timings", lambda device, seconds: found):
        kinds = by_kind()
    assert set(kinds) == {t.kind for t in found} | {"all"} and kinds["all"].samples == len(found)
    for f in kinds.values():
        assert f.machine.flops_per_s > 0 and f.machine.bytes_per_s > 0 and f.machine.overhead_s >= 0
        assert 0 <= f.median_error <= f.worst_error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(FloorplanError, match="timings: cuda"):
        by_kind("cuda")
