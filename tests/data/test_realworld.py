"""RealWorld's zips as published: zips in zips, sensors at their own times, pauses, missing files."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from floorplan.data import realworld
from floorplan.errors import FloorplanError

HEADER = "id,attr_time,attr_x,attr_y,attr_z\n"
PREFIX = {"acc": "acc", "gyr": "Gyroscope", "mag": "MagneticField"}
T0 = 1_435_993_900_000


def csv(times: list[int], offset: float = 0.0) -> str:
    """x is the time in ms since T0 plus an offset, y its negative, z constant."""
    lines = (f"{i},{T0 + t},{t + offset},{-t},9.81\n" for i, t in enumerate(times, 1))
    return HEADER + "".join(lines)


def zipped(members: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def put(root: Path, subject: int, name: str, members: dict[str, str | bytes]) -> Path:
    path = root / f"proband{subject}" / "data" / f"{name}_csv.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zipped(members))
    return path


def walk(root: Path, subject: int = 1, rows: int = 50, places: tuple[str, ...] = ("chest",)) -> None:
    times = list(range(0, 20 * rows, 20))
    for sensor, prefix in PREFIX.items():
        members: dict[str, str | bytes] = {f"{prefix}_walking_{p}.csv": csv(times) for p in places}
        put(root, subject, f"{sensor}_walking", members | {"readMe": "text"})


def test_sensors_meet_on_one_grid(tmp_path: Path) -> None:
    put(tmp_path, 3, "acc_walking", {"acc_walking_chest.csv": csv([0, 20, 40, 60, 80, 100])})
    put(tmp_path, 3, "gyr_walking", {"Gyroscope_walking_chest.csv": csv([90, 10, 30, 30, 70], 1000)})
    (chest,) = realworld.load(tmp_path, sensors=["acc", "gyr"])
    assert (chest.subject, chest.place, chest.name) == (3, "chest", "proband3-walking1-chest-0")
    assert chest.x[:, 0].tolist() == [10, 30, 50, 70, 90]  # from 10 to 90, where both run
    assert chest.x[:, 3].tolist() == [1010, 1030, 1050, 1070, 1090]
    assert chest.y.tolist() == [7] * 5 and chest.x.dtype == np.float32


def test_zips_in_zips_and_numbered_files(tmp_path: Path) -> None:
    for sensor, prefix in PREFIX.items():
        parts: dict[str, str | bytes] = {
            f"{sensor}_climbingup_{k}_csv.zip": zipped({f"{prefix}_climbingup{tail}_waist.csv": csv([0, 20, 40])})
            for k, tail in ((1, ""), (2, "_2"), (3, "_3"))
        }
        put(tmp_path, 4, f"{sensor}_climbingup", parts)
        put(tmp_path, 4, f"{sensor}_walking", {f"{prefix}_walking_2_shin.csv": csv([0, 20])})
    loaded = realworld.load(tmp_path)
    assert [r.name for r in loaded] == [
        *(f"proband4-climbingup{k}-waist-0" for k in (1, 2, 3)),
        "proband4-walking2-shin-0",
    ]
    assert loaded[0].x.shape == (3, 9) and loaded[0].y.tolist() == [1, 1, 1]


def test_unpacked_zips_are_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "realworld2016_dataset" / "proband1" / "data" / "acc_lying_csv"
    folder.mkdir(parents=True)
    (folder / "acc_lying_head.csv").write_text(csv([0, 20]))
    (head,) = realworld.load(tmp_path, sensors=["acc"])
    assert head.x.shape == (2, 3) and head.y.tolist() == [3, 3]


def test_a_pause_ends_a_recording(tmp_path: Path) -> None:
    put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": csv([*range(0, 201, 20), *range(5000, 5101, 20)])})
    put(tmp_path, 1, "gyr_lying", {"Gyroscope_lying_head.csv": csv(list(range(0, 6000, 20)))})
    assert [len(r.y) for r in realworld.load(tmp_path, sensors=["acc", "gyr"])] == [11, 6]
    # A clock that jumps by years makes no endless grid.
    put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": csv([-T0 + 1, 0, 20])})
    (only,) = realworld.load(tmp_path, sensors=["acc"])
    assert only.x[:, 0].tolist() == [0, 20]


def test_lacking_sensor_is_left_out_with_a_warning(tmp_path: Path) -> None:
    walk(tmp_path, places=("chest", "head"))
    put(tmp_path, 1, "gyr_walking", {"Gyroscope_walking_head.csv": csv([0, 20])})
    with pytest.warns(UserWarning, match="proband1-walking1-chest left out: no gyr file"):
        assert [r.place for r in realworld.load(tmp_path)] == ["head"]


def test_protocol_leaves_a_place_out(tmp_path: Path) -> None:
    for s in (1, 2):
        walk(tmp_path, s, 3000, ("chest", "head", "shin"))
    shift = realworld.protocol(realworld.load(tmp_path), target="head")
    assert shift.source.x.shape == (2 * 2 * 8, 9, 500)
    assert [len(shift.source_test), len(shift.adapt), len(shift.test)] == [4, 16, 2]
    assert all("head" in r for r in shift.test.record)
    assert not any("head" in r for r in shift.source.record)
    assert [r.place for r in realworld.load(tmp_path, subjects=[2], places=["shin"])] == ["shin"]


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    def says(match: str) -> None:
        with pytest.raises(FloorplanError, match=match) as e:
            realworld.load(tmp_path, sensors=["acc"])
        assert "\n" not in str(e.value)

    says("no folder like proband1/data")
    inner = "acc_lying_csv.zip/acc_lying_head.csv"
    put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": csv([0, 20]) + "3,4\n"})
    says(f"{inner}, line 4: 2 columns, not 5")
    put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": csv([0, 20]).replace("9.81", "g", 1)})
    says(f"{inner}, line 2: column 4: 'g' is not a number")
    put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": "time,x,y,z\n1,2,3,4\n"})
    says(f"{inner}, line 1: not the header id,attr_time")
    put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": HEADER})
    says(f"{inner}: holds no rows")
    put(tmp_path, 1, "acc_lying", {"acc_walking_head.csv": csv([0, 20])})
    says("is no acc file of lying")
    path = put(tmp_path, 1, "acc_lying", {"acc_lying_head.csv": csv(list(range(0, 9000, 20)))})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    says("acc_lying_csv.zip: is no whole zip")
    path.write_bytes(whole[:200] + bytes(50) + whole[250:])
    says(f"{inner}: cannot be unpacked|{inner}, line")
    path.unlink()
    says("no csv of acc in it")
    with pytest.raises(FloorplanError, match="no sensor or place 'gps'"):
        realworld.load(tmp_path, sensors=["gps"])
