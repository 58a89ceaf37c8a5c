"""A .npy of objects gives dicts, lists, numbers and arrays of numbers; nothing in it is run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from floorplan.data.npy_pickle import read_objects
from floorplan.errors import FloorplanError


def written(path: Path, value: Any) -> Path:
    np.save(path, np.array(value, dtype=object), allow_pickle=True)
    return path


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = read_objects(written(tmp_path / "a.npy", {"rows": [rows, rows], "n": 3, "name": "x"}))
    found = found.item() if isinstance(found, np.ndarray) else found
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    assert found["n"] == 3 and found["name"] == "x" and np.array_equal(found["rows"][0], rows)
    assert found["rows"][1].dtype == np.float32


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize("kind", ["code", "class", "numbers", "text", "gone"])
def test_anything_else_is_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.npy"
    if kind in ("code", "class"):
        written(path, {"a": Evil() if kind == "code" else Path})
    elif kind == "numbers":
        np.save(path, np.arange(3))
    elif kind == "text":
        path.write_text("no numpy file")
    with pytest.raises(FloorplanError, match="a.npy: (not the expected .npy|no such file)") as e:
        read_objects(path)
    assert "\n" not in str(e.value) and not capsys.readouterr().out
