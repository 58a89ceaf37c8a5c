"""REALDISP's logs as published: sensors, placements, the split inside each activity."""

from pathlib import Path

import numpy as np
import pytest

from floorplan.data import realdisp
from floorplan.errors import FloorplanError


def write(path: Path, labels: list[int], separator: str = "\t") -> Path:
    """Column c of row t holds c + t / 10."""
    lines = [[*(f"{c + t / 10:.1f}" for c in range(119)), str(y)] for t, y in enumerate(labels)]
    path.write_text("".join(separator.join(line) + "\n" for line in lines))
    return path


def test_columns() -> None:
    default = realdisp.columns()
    assert len(default) == 81 and min(default) == 2 and len(realdisp.CLASSES) == 33
    assert default[2] == "RLA acc0" and default[5] == "RLA gyro0" and default[10] == "RLA mag2"
    assert 11 not in default and default[15] == "RUA acc0"
    every = realdisp.columns(quantities=tuple(realdisp.QUANTITIES))
    assert list(every) == list(range(2, 119)) and every[118] == "LC quat3"
    assert list(realdisp.columns(["BACK"], ["acc"])) == [28, 29, 30]


def test_logs_become_recordings(tmp_path: Path) -> None:
    for name in ("subject2_ideal", "subject10_ideal", "subject2_self", "subject2_mutual4"):
        write(tmp_path / f"{name}.log", [0, 1, 33], " ")
    loaded = realdisp.load(tmp_path)
    assert [(r.subject, r.place) for r in loaded] == [(2, "ideal"), (2, "self"), (10, "ideal")]
    assert loaded[0].y.tolist() == [-1, 0, 32] and loaded[0].x.shape == (3, 81)
    assert np.allclose(loaded[0].x[1, :3], [2.1, 3.1, 4.1])
    mutual = realdisp.load(tmp_path, placements=["mutual"], quantities=["quat"], sensors=["LC"])
    assert [r.place for r in mutual] == ["mutual4"] and np.allclose(mutual[0].x[0], [115, 116, 117, 118])


def test_a_log_of_zeros_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "subject6_ideal.log", [1])
    row = " ".join(["7", "5", *["0"] * 117, "3"])
    (tmp_path / "subject6_self.log").write_text(f"{row}\n{row}\n")
    with pytest.warns(UserWarning, match="subject6_self.log: left out: every sensor value is 0"):
        assert [r.name for r in realdisp.load(tmp_path)] == ["subject6_ideal"]


def test_each_activity_is_split_in_time(tmp_path: Path) -> None:
    labels = [0] * 40 + [1] * 2000 + [0] * 10 + [5] * 600 + [7] * 300
    for place in ("ideal", "self"):
        write(tmp_path / f"subject1_{place}.log", labels)
    shift = realdisp.protocol(realdisp.load(tmp_path, sensors=["RLA"], quantities=["acc"]))
    # 2000 rows: 1600 + 400; 600: the test part grows from 120 rows to one window; 300: no room for two.
    assert np.bincount(shift.source.y).tolist() == [11, 0, 0, 0, 1]
    assert np.bincount(shift.test.y).tolist() == [2, 0, 0, 0, 1]
    assert shift.test.start.tolist() == [1640, 1765, 2400] and set(shift.test.record) == {"subject1_self"}
    assert shift.source.x.shape[1:] == (3, 250) and set(shift.source.record) == {"subject1_ideal"}


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    def says(match: str) -> None:
        with pytest.raises(FloorplanError, match=match) as e:
            realdisp.load(tmp_path)
        assert "\n" not in str(e.value)

    says(r"no file like subject1_ideal\|self.log")
    path = write(tmp_path / "subject1_ideal.log", [1, 2, 34])
    says("subject1_ideal.log, line 3: label 34 is not one of 0 to 33")
    path.write_text(write(path, [1, 2]).read_text() + "\n1\t2\n")
    says("line 4: 2 columns, not 120")
    path.write_bytes(b"\x80\xff\x00junk\n")
    says("line 1: 1 columns, not 120")
    with pytest.raises(FloorplanError, match="no sensor or quantity 'HEAD'"):
        realdisp.load(tmp_path, sensors=["HEAD"])
    with pytest.raises(FloorplanError, match="no such folder"):
        realdisp.load(tmp_path / "none")
