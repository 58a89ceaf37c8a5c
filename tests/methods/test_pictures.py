"""Pictures of a comparison are written whole, and their parts add up."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from floorplan.errors import FloorplanError
from floorplan.methods.compare import Comparison, compare
from floorplan.methods.pictures import draw, parts


@cache
def found() -> Comparison:
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    return compare(model, torch.randn(2, 6, 20), methods=("full", "memflora"), batches=(1, 4))


def test_pictures_are_written_whole(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.png", "b.svg"):
        draw(found(), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "</svg>" in (tmp_path / "b.svg").read_text()
    with pytest.raises(FloorplanError, match="c.xyz"):
        draw(found(), tmp_path / "c.xyz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.svg"]


def test_the_parts_of_a_peak_add_up() -> None:
    for r in found().rows:
        assert r.predicted is not None and sum(parts(r)) == r.predicted.training_state_peak
        assert min(parts(r)) >= 0
