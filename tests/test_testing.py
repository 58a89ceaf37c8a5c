"""assert_memory_floor: what was assumed at the floor, a table of the guilty otherwise."""

import pytest
import torch
from small import Residual, Smooth

from floorplan.testing import assert_memory_floor


def test_at_the_floor_it_says_what_that_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert_memory_floor(Residual(), torch.randn(2, 3, 16, 16), rank=2, sites="all")
    said = capsys.readouterr().out
    assert said.startswith("Residual is AT_FLOOR in train mode\n") and "\nassumes: " in said


def test_the_message_is_the_table_of_guilty_tensors() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_memory_floor(Smooth(), torch.randn(2, 3, 16, 16), rank=2)
    text = str(caught.value)
    assert "ABOVE_FLOOR" in text and "SiLU" in text and "[B, C" in text and "recomputation" in text
