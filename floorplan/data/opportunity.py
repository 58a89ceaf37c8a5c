"""Opportunity: S1-ADL1.dat ... S4-Drill.dat, 30 Hz, 250 columns split by spaces, NaN where missing.

column 0 time | 1-36 twelve accelerometers | 37-101 five IMUs | 102-133 two shoes | ... | 243-249 labels
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from floorplan.data.splits import Shift, leave_subject_out, make_shift
from floorplan.data.text import by_subject, folder_at, opener, read_table, require_labels, require_unique
from floorplan.data.windows import UNLABELLED, Recording, Rule, whole
from floorplan.errors import FloorplanError

SIZE, STRIDE, HERTZ = 60, 30, 30
WIDTH = 250

_AXES = ("X", "Y", "Z")
_ACCELEROMETERS = ("RKN^", "HIP", "LUA^", "RUA_", "LH", "BACK", "RKN_", "RWR", "RUA^", "LUA_", "LWR", "RH")
_IMU = (*(f"{k}{a}" for k in ("acc", "gyro", "magnetic") for a in _AXES), *(f"Quaternion{i}" for i in range(1, 5)))
_TURNS = {"Eu": "XYZ", "Nav_A": "xyz", "Body_A": "xyz", "AngVelBodyFrame": "XYZ", "AngVelNavFrame": "XYZ"}
_SHOE = (*(f"{kind}{a}" for kind, axes in _TURNS.items() for a in axes), "Compass")

# 0-based column -> name, for the 133 columns worn on the body.
_NAMES = (
    *(f"Accelerometer {place} acc{a}" for place in _ACCELEROMETERS for a in _AXES),
    *(f"IMU {place} {field}" for place in ("BACK", "RUA", "RLA", "LUA", "LLA") for field in _IMU),
    *(f"IMU {place} {field}" for place in ("L-SHOE", "R-SHOE") for field in _SHOE),
)
BODY: dict[int, str] = dict(enumerate(_NAMES, start=1))

# "imu" is the 97 channels of the paper's input; "challenge" the 113 that others report.
COLUMNS: dict[str, tuple[int, ...]] = {
    "imu": tuple(c for c, name in BODY.items() if name.startswith("IMU")),
    "challenge": tuple(c for c, name in BODY.items() if "Quaternion" not in name),
    "body": tuple(BODY),
}

_DOORS = {516: "Door 1", 517: "Door 2"}
_OPENED = {520: "Fridge", 505: "Dishwasher", 519: "Drawer 1", 511: "Drawer 2", 508: "Drawer 3"}
_WAYS = {406000: "Open", 404000: "Close"}
_GESTURES = {
    **{way + thing: f"{verb} {name}" for way, verb in _WAYS.items() for thing, name in _DOORS.items()},
    **{way + thing: f"{verb} {name}" for thing, name in _OPENED.items() for way, verb in _WAYS.items()},
    **{408512: "Clean Table", 407521: "Drink from Cup", 405506: "Toggle Switch"},
}
# Label track -> its 0-based column and its codes in class order; code 0 is no label.
LABELS: dict[str, tuple[int, dict[int, str]]] = {
    "ml_both_arms": (249, _GESTURES),
    "locomotion": (243, {1: "Stand", 2: "Walk", 4: "Sit", 5: "Lie"}),
}

_FILE = re.compile(r"S(\d+)-(ADL\d+|Drill)\.dat", re.IGNORECASE)


def load(
    folder: str | Path, columns: str = "imu", label: str = "ml_both_arms", subjects: Collection[int] | None = None
) -> list[Recording]:
    """Every .dat file in the folder or below it, as one recording (T, C) each.

    columns: imu (97), challenge (113) or body (133); label: ml_both_arms (17 classes) or locomotion (4).
    """
    for value, choices in ((columns, list(COLUMNS)), (label, list(LABELS))):
        if value not in choices:
            raise FloorplanError(f"Opportunity: no choice {value!r}; use one of {choices}")
    root = folder_at(folder, "Opportunity's S1-ADL1.dat ...")
    found = ((int(m[1]), p) for p in sorted(root.rglob("*.dat")) if (m := _FILE.fullmatch(p.name)))
    paths = by_subject(found, subjects, root, "no file like S1-ADL1.dat in it; name Opportunity's folder")
    require_unique([p.stem for _, p in paths], root)
    return [_read(p, s, columns, label) for s, p in paths]


def protocol(recordings: Sequence[Recording], target: int, rule: Rule = "majority") -> Shift:
    """The paper's shift: one subject is the target, the others are the source; windows 60/30."""
    source, held = leave_subject_out(recordings, target)
    return make_shift(whole(source), whole(held), SIZE, STRIDE, rule=rule)


def _read(path: Path, subject: int, columns: str, label: str) -> Recording:
    """Codes become 0..K-1; 0 and a missing label are no label."""
    table = read_table(opener(path), str(path), WIDTH)
    column, codes = LABELS[label]
    raw, y = table[:, column], np.full(len(table), UNLABELLED, dtype=np.int64)
    for k, code in enumerate(codes):
        y[raw == code] = k
    odd = (y == UNLABELLED) & (raw != 0) & np.isfinite(raw)
    require_labels(path, raw, odd, "unknown label {}; use the UCI release of 250 columns")
    return Recording(path.stem, table[:, COLUMNS[columns]].astype(np.float32), y, subject, "body")
