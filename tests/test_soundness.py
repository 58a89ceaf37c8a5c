"""No verdict of AT_FLOOR is false, over a generated family; benchmarks/soundness.py does a thousand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sized_nets import full_map_at, member

import floorplan


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_what_is_at_the_floor_keeps_no_full_map(seed: int) -> None:
    report = floorplan.check(member(seed), torch.randn(6, 3, 16, 16))
    if report.verdict == "AT_FLOOR":
        assert full_map_at(member(seed), seed) is None, list(report.rests_on())
