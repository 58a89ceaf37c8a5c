"""Tables of numbers in text files: read fast, and the line to blame when they are refused."""

import io
from pathlib import Path

import numpy as np
import pytest

from floorplan.data.text import by_subject, folder_at, opener, read_table, require_labels, require_unique
from floorplan.errors import FloorplanError


def test_a_table_below_its_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,b\n1,2\n\n3,4.5\n")
    found = read_table(opener(tmp_path / "t.csv"), "t.csv", 2, ",", header=1)
    assert found.dtype == np.float64 and found.tolist() == [[1, 2], [3, 4.5]]
    odd = found[:, 0] == 3
    with pytest.raises(FloorplanError, match="t.csv, line 4: odd 3$"):  # blank lines are no rows
        require_labels(tmp_path / "t.csv", np.array([0, *found[:, 0]]), np.array([False, *odd]), "odd {}")


@pytest.mark.parametrize(
    "text,why",
    [
        ("1 2\n3\n", "f, line 2: 1 columns, not 2; download it again"),
        ("1 2\n\n3 x\n", "f, line 3: column 1: 'x' is not a number; download it again"),
        ("1 2 3\n", "f, line 1: 3 columns, not 2; download it again"),
        ("", "f: holds no rows; download it again"),
    ],
)
def test_the_line_to_blame(text: str, why: str) -> None:
    with pytest.raises(FloorplanError) as e:
        read_table(lambda: io.StringIO(text), "f", 2)
    assert str(e.value) == why


def test_files_folders_and_subjects(tmp_path: Path) -> None:
    with pytest.raises(FloorplanError, match="gone: No such file or directory; check that it can be read"):
        read_table(opener(tmp_path / "gone"), "gone", 2)
    assert folder_at(tmp_path, "rows") == tmp_path
    with pytest.raises(FloorplanError, match="no such folder; name the folder that holds rows"):
        folder_at(tmp_path / "gone", "rows")
    files = [(s, tmp_path / str(s)) for s in (3, 1, 2)]
    assert [s for s, _ in by_subject(files, None, tmp_path, "")] == [1, 2, 3]
    assert by_subject(files, [2, 1, 2], tmp_path, "") == [files[1], files[2]]
    with pytest.raises(FloorplanError, match="nothing$"):
        by_subject([], None, tmp_path, "nothing")
    with pytest.raises(FloorplanError, match=r"no files of subject 4; it holds subjects \[1, 2, 3\]"):
        by_subject(files, [4, 9], tmp_path, "")
    require_unique(["a", "b"], tmp_path)
    with pytest.raises(FloorplanError, match="holds b twice; name one of its folders"):
        require_unique(["a", "b", "b"], tmp_path)
