"""REALDISP: subject1_ideal.log, subject1_self.log, subject2_mutual4.log ..., 50 Hz, 120 columns.

columns 0-1 time | 2-118 nine sensors of 13 (acc 3, gyro 3, mag 3, quaternion 4) | 119 label, 0 = none

A recording holds every activity once, one after the other: it is split in time activity by activity.
"""

import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from floorplan.data.splits import Shift, make_shift, placement_split
from floorplan.data.text import by_subject, folder_at, opener, read_table, require_labels, require_unique
from floorplan.data.windows import Recording, Rule, runs
from floorplan.errors import FloorplanError

SIZE, STRIDE, HERTZ = 250, 125, 50
WIDTH, LABEL_COLUMN = 120, 119
CLASSES = tuple(f"A{i}" for i in range(1, 34))
SENSORS = ("RLA", "RUA", "BACK", "LUA", "LLA", "RC", "RT", "LT", "LC")
# Quantity -> its offsets among the 13 columns of a sensor.
QUANTITIES = {"acc": (0, 1, 2), "gyro": (3, 4, 5), "mag": (6, 7, 8), "quat": (9, 10, 11, 12)}

_FILE = re.compile(r"subject(\d+)_(ideal|self|mutual\d+)\.log", re.IGNORECASE)


def columns(sensors: Sequence[str] = SENSORS, quantities: Sequence[str] = ("acc", "gyro", "mag")) -> dict[int, str]:
    """0-based column -> name, sensor by sensor; 81 columns by default."""
    for value in (*sensors, *quantities):
        if value not in (*SENSORS, *QUANTITIES):
            raise FloorplanError(f"REALDISP: no sensor or quantity {value!r}; use {SENSORS} and {tuple(QUANTITIES)}")
    return {
        2 + 13 * SENSORS.index(s) + offset: f"{s} {q}{i}"
        for s in sensors
        for q in quantities
        for i, offset in enumerate(QUANTITIES[q])
    }


def load(
    folder: str | Path,
    sensors: Sequence[str] = SENSORS,
    quantities: Sequence[str] = ("acc", "gyro", "mag"),
    subjects: Collection[int] | None = None,
    placements: Sequence[str] = ("ideal", "self"),
) -> list[Recording]:
    """Every .log of these placements in the folder or below it; `place` is ideal, self or mutualK.

    "mutual" among the placements stands for every mutualK. A log without a sensor value other than 0,
    of which the release has three, is left out with a warning.
    """
    picked = columns(sensors, quantities)
    root = folder_at(folder, "REALDISP's subject1_ideal.log ...")
    logs = ((int(m[1]), p) for p in sorted(root.rglob("*.log")) if (m := _FILE.fullmatch(p.name)))
    found = ((s, p) for s, p in logs if {_place(p), _place(p).rstrip("0123456789")} & set(placements))
    none = f"no file like subject1_{'|'.join(placements)}.log in it; name REALDISP's folder"
    paths = by_subject(found, subjects, root, none)
    require_unique([p.stem for _, p in paths], root)
    read = [_read(p, s, list(picked)) for s, p in paths]
    return [r for r in read if r is not None]


def protocol(
    recordings: Sequence[Recording], source: str = "ideal", target: str = "self", rule: Rule = "majority"
) -> Shift:
    """The paper's shift: ideal placement is the source, self placement the target; windows 250/125.

    Where 20 % of an activity is shorter than a window, its last 250 rows are the test part.
    """
    ideal, displaced = placement_split(recordings, source, target)
    return make_shift(runs(ideal), runs(displaced), SIZE, STRIDE, rule=rule)


def _place(path: Path) -> str:
    return path.stem.split("_", 1)[1].lower()


def _read(path: Path, subject: int, picked: list[int]) -> Recording | None:
    table = read_table(opener(path), str(path), WIDTH)
    if not table[:, 2:LABEL_COLUMN].any():
        warnings.warn(f"{path}: left out: every sensor value is 0", stacklevel=2)
        return None
    raw = table[:, LABEL_COLUMN]  # 1 to 33, which become 0 to 32; 0 becomes -1, no label
    odd = ~np.isin(raw, np.arange(len(CLASSES) + 1))
    require_labels(path, raw, odd, "label {} is not one of 0 to 33; download it again")
    x, y = table[:, picked].astype(np.float32), raw.astype(np.int64) - 1
    return Recording(path.stem, x, y, subject, _place(path))
