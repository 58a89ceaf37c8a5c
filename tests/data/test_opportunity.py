"""Opportunity's files as published: columns, labels, missing values, and errors that name the line."""

from pathlib import Path

import numpy as np
import pytest

from floorplan.data import opportunity
from floorplan.data.windows import cut, whole
from floorplan.errors import FloorplanError


def rows(count: int, code: int = 406516, locomotion: int = 1) -> list[list[str]]:
    """Column c of row t holds 1000 t + c; labels at the end."""
    table = [[str(1000 * t + c) for c in range(243)] for t in range(count)]
    return [[*row, str(locomotion), "0", "0", "0", "0", "0", str(code)] for row in table]


def write(path: Path, table: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(" ".join(row) + "\n" for row in table))
    return path


def test_columns() -> None:
    c = opportunity.COLUMNS
    assert [len(c[k]) for k in ("imu", "challenge", "body")] == [97, 113, 133]
    assert c["imu"] == tuple(range(37, 134)) and c["body"] == tuple(range(1, 134))
    left_out = set(c["body"]) - set(c["challenge"])
    assert left_out == {first + i for first in (46, 59, 72, 85, 98) for i in range(4)}
    names = opportunity.BODY
    assert names[1] == "Accelerometer RKN^ accX" and names[36] == "Accelerometer RH accZ"
    assert names[37] == "IMU BACK accX" and names[49] == "IMU BACK Quaternion4"
    assert names[50] == "IMU RUA accX" and names[101] == "IMU LLA Quaternion4"
    assert names[102] == "IMU L-SHOE EuX" and names[117] == "IMU L-SHOE Compass"
    assert names[118] == "IMU R-SHOE EuX" and names[133] == "IMU R-SHOE Compass"
    assert len(opportunity.LABELS["ml_both_arms"][1]) == 17


def test_a_file_becomes_a_recording(tmp_path: Path) -> None:
    table = rows(3)
    table[1][37], table[0][249], table[2][249] = "NaN", "0", "405506"
    write(tmp_path / "dataset" / "S2-ADL3.dat", table)
    write(tmp_path / "dataset" / "S1-Drill.dat", rows(2))
    (tmp_path / "dataset" / "notes.dat").write_text("not data")
    drill, adl = opportunity.load(tmp_path)
    assert (drill.name, drill.subject, adl.name, adl.subject) == ("S1-Drill", 1, "S2-ADL3", 2)
    assert adl.x.shape == (3, 97) and adl.x.dtype == np.float32 and adl.y.tolist() == [-1, 0, 16]
    assert adl.x[0, 0] == 37 and adl.x[2, 96] == 2133 and np.isnan(adl.x[1, 0])
    assert cut(whole([adl]), 3, 1).x[0, 0].tolist() == [37, 1037, 2037]
    assert [r.subject for r in opportunity.load(tmp_path, subjects=[2])] == [2]
    walk = opportunity.load(tmp_path, columns="body", label="locomotion")[0]
    assert walk.x.shape == (2, 133) and walk.x[0, 0] == 1 and walk.y.tolist() == [0, 0]


def test_protocol(tmp_path: Path) -> None:
    for s in (1, 2, 3):
        write(tmp_path / f"S{s}-ADL1.dat", rows(400, 404516))
    shift = opportunity.protocol(opportunity.load(tmp_path), target=3)
    assert shift.source.x.shape == (2 * 9, 97, 60) and len(shift.test) == 1 and len(shift.adapt) == 9
    assert set(shift.source.subject) == {1, 2} and set(shift.test.subject) == {3}
    assert set(shift.source.y) == {2}


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    def says(match: str) -> None:
        with pytest.raises(FloorplanError, match=match) as e:
            opportunity.load(tmp_path)
        assert "\n" not in str(e.value)

    says("no file like S1-ADL1.dat")
    path, table = tmp_path / "S1-ADL1.dat", rows(4)
    write(path, [*table[:2], table[2][:-1], table[3]])
    says("S1-ADL1.dat, line 3: 249 columns, not 250")
    write(path, [row[:-1] for row in table])
    says("line 1: 249 columns, not 250")
    table[1][7] = "x1"
    write(path, table)
    says("line 2: column 7: 'x1' is not a number")
    table[1][7], table[3][249] = "1", "12"
    write(path, table)
    says("line 4: unknown label 12")
    path.write_text("")
    says("holds no rows")
    write(path, rows(2))
    write(tmp_path / "copy" / "S1-ADL1.dat", rows(2))
    says("holds S1-ADL1 twice")
    with pytest.raises(FloorplanError, match="no such folder"):
        opportunity.load(tmp_path / "none")
    with pytest.raises(FloorplanError, match="no choice 'all'"):
        opportunity.load(tmp_path, columns="all")
    with pytest.raises(FloorplanError, match="no files of subject 4"):
        opportunity.load(tmp_path, subjects=[4])
