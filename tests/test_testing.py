"""assert_memory_floor: silent at the floor, a table of the guilty otherwise."""

import pytest
import torch
from small import Residual, Smooth

from floorplan.testing import assert_memory_floor


def test_silent_at_the_floor() -> None:
    assert_memory_floor(Residual(), torch.randn(2, 3, 16, 16), rank=2, sites="all")


def test_the_message_is_the_table_of_guilty_tensors() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_memory_floor(Smooth(), torch.randn(2, 3, 16, 16), rank=2)
    text = str(caught.value)
    assert "ABOVE_FLOOR" in text and "SiLU" in text and "[B, C" in text and "recomputation" in text
