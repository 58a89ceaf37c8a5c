"""RealWorld (2016): proband1/data/acc_walking_csv.zip with acc_walking_chest.csv ..., about 50 Hz.

one csv a sensor, activity, place and part:  id, attr_time [ms], attr_x, attr_y, attr_z
one recording a subject, activity, place and part: its sensors on one 50 Hz grid

A zip may hold further zips, one a part (climbingup_2). The phones sample each sensor at its own times:
values are interpolated onto the grid, and where any sensor pauses for over a second the recording ends.
"""

import io
import itertools
import re
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from floorplan.data.splits import Shift, leave_place_out, make_shift
from floorplan.data.text import Open, by_subject, folder_at, opener, read_table, require_unique
from floorplan.data.windows import Recording, Rule, whole
from floorplan.errors import FloorplanError

SIZE, STRIDE, HERTZ = 500, 250, 50
ACTIVITIES = ("climbingdown", "climbingup", "jumping", "lying", "running", "sitting", "standing", "walking")
PLACES = ("chest", "forearm", "head", "shin", "thigh", "upperarm", "waist")
# Prefix of the zip -> prefix of the csv files in it.
SENSORS = {"acc": "acc", "gyr": "gyroscope", "mag": "magneticfield"}

_STEP, _PAUSE = 1000 / HERTZ, 1000.0  # milliseconds
_HEADER = ["id", "attr_time", "attr_x", "attr_y", "attr_z"]
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError)
_CSV = re.compile(r"([a-z]+)_([a-z]+?)(?:_(\d+))?_([a-z]+)\.csv")

Series = tuple[NDArray[np.float64], NDArray[np.float64]]  # times (T,), values (T, 3)


def load(
    folder: str | Path,
    sensors: Sequence[str] = ("acc", "gyr", "mag"),
    subjects: Collection[int] | None = None,
    places: Sequence[str] = PLACES,
) -> list[Recording]:
    """Recordings (T, 3 x sensors) of every proband in the folder or below it; `place` is a body part.

    A recording that lacks one of the sensors is left out with a warning.
    """
    for value in (*sensors, *places):
        if value not in (*SENSORS, *PLACES):
            raise FloorplanError(f"RealWorld: no sensor or place {value!r}; use {tuple(SENSORS)} and {PLACES}")
    root = folder_at(folder, "RealWorld's proband1 ...")
    probands = sorted([root, *root.rglob("proband*")])
    named = ((int(m[1]), p / "data") for p in probands if (m := re.fullmatch(r"proband(\d+)", p.name)))
    none = "no folder like proband1/data in it; name RealWorld's folder"
    folders = by_subject(((s, p) for s, p in named if p.is_dir()), subjects, root, none)
    recordings = [r for s, p in folders for a in ACTIVITIES for r in _read(p, s, a, sensors, places)]
    if not recordings:
        raise FloorplanError(f"{root}: no csv of {', '.join(sensors)} in it; unpack only the outer zip")
    require_unique([r.name for r in recordings], root)
    return recordings


def protocol(recordings: Sequence[Recording], target: str, rule: Rule = "majority") -> Shift:
    """The paper's shift: one place on the body is the target, the others the source; windows 500/250."""
    source, held = leave_place_out(recordings, target)
    return make_shift(whole(source), whole(held), SIZE, STRIDE, rule=rule)


def _read(
    data: Path, subject: int, activity: str, sensors: Sequence[str], places: Sequence[str]
) -> Iterator[Recording]:
    series = {sensor: _sensor(data, sensor, activity, places) for sensor in sensors}
    for part, place in sorted(set().union(*series.values())):
        name = f"proband{subject}-{activity}{part}-{place}"
        lacking = [s for s in sensors if (part, place) not in series[s]]
        aligned = [] if lacking else list(_aligned([series[s][part, place] for s in sensors]))
        if not aligned:
            why = f"no {lacking[0]} file" if lacking else "its sensors never run at one time"
            warnings.warn(f"{data}: {name} left out: {why}", stacklevel=2)
        for i, x in enumerate(aligned):
            y = np.full(len(x), ACTIVITIES.index(activity), dtype=np.int64)
            yield Recording(f"{name}-{i}", x.astype(np.float32), y, subject, place)


def _sensor(data: Path, sensor: str, activity: str, places: Sequence[str]) -> dict[tuple[int, str], Series]:
    """(part, place) -> series, from the zip of one sensor and activity or its unpacked folder."""
    found: dict[tuple[int, str], Series] = {}
    stem = data / f"{sensor}_{activity}_csv"
    unpacked = ((str(p), p.name, opener(p)) for p in sorted(stem.rglob("*.csv")))
    for where, name, open_text in itertools.chain(_in_zip(stem.with_suffix(".zip")), unpacked):
        match = _CSV.fullmatch(name.lower())
        if not match or match[4] not in places:
            continue
        if (match[1], match[2]) not in ((SENSORS[sensor], activity), (sensor, activity)):
            raise FloorplanError(f"{where}: is no {sensor} file of {activity}; download the zip again")
        key = int(match[3] or 1), match[4]
        if key in found:
            raise FloorplanError(f"{where}: the same series twice; remove the zip or the folder")
        found[key] = _series(open_text, where)
    return found


def _in_zip(path: Path) -> Iterator[tuple[str, str, Open]]:
    """Every csv in a zip, also in the zips inside it."""
    if not path.exists():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            yield from _members(archive, str(path))
    except _BROKEN as e:
        raise FloorplanError(f"{path}: is no whole zip ({e}); download it again") from e


def _members(archive: zipfile.ZipFile, where: str) -> Iterator[tuple[str, str, Open]]:
    for member in sorted(archive.namelist()):
        if member.endswith(".zip"):
            with zipfile.ZipFile(io.BytesIO(archive.read(member))) as inner:
                yield from _members(inner, f"{where}/{member}")
        elif member.endswith(".csv"):
            yield f"{where}/{member}", Path(member).name, partial(_opened, archive, member)


def _opened(archive: zipfile.ZipFile, member: str) -> TextIO:
    return io.TextIOWrapper(archive.open(member), encoding="utf-8", errors="replace")


def _series(open_text: Open, where: str) -> Series:
    try:
        with open_text() as f:
            header = [field.strip().strip('"').lower() for field in f.readline().split(",")]
        if header != _HEADER:
            raise FloorplanError(f"{where}, line 1: not the header {','.join(_HEADER)}; download it again")
        table = read_table(open_text, where, len(_HEADER), delimiter=",", header=1)
    except _BROKEN as e:
        raise FloorplanError(f"{where}: cannot be unpacked ({e}); download it again") from e
    table = table[np.isfinite(table).all(axis=1)]
    if not len(table):
        raise FloorplanError(f"{where}: holds no row without gaps; download it again")
    times, first = np.unique(table[:, 1], return_index=True)
    return times, table[first, 2:]


def _aligned(series: Sequence[Series]) -> Iterator[NDArray[np.float64]]:
    """(T, 3 x sensors) for each stretch of time in which every sensor runs without a pause."""
    spans = [(-np.inf, np.inf)]
    for times, _ in series:
        cuts = np.flatnonzero(np.diff(times) > _PAUSE)
        stretches = list(zip(times[[0, *(cuts + 1)]], times[[*cuts, len(times) - 1]], strict=True))
        spans = [(max(a, c), min(b, d)) for a, b in spans for c, d in stretches if max(a, c) < min(b, d)]
    for a, b in spans:
        grid = a + _STEP * np.arange(int((b - a) / _STEP) + 1)
        yield np.stack([np.interp(grid, t, v[:, i]) for t, v in series for i in range(3)], axis=1)
