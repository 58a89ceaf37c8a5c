"""The watch set: a pickle that may run nothing, the protocol's counts, a download that is checked."""

import hashlib
import os
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from floorplan.data import watch
from floorplan.errors import FloorplanError

# Where examples/adapt_watch.py fetches it to.
REAL = Path(__file__).parents[2] / ".data" / watch.FILE


def content(rows: int = 300) -> dict[str, Any]:
    keys = [(s, d, y) for s in range(1, 11) for d in (0, 1) for y in range(7)]
    rng = np.random.default_rng(0)
    return {
        "X": [rng.normal(s + 10 * d, 1 + y, (rows + 10 * y, 6)) for s, d, y in keys],
        "y": np.array([k[2] for k in keys]),
        "subject": np.array([k[0] for k in keys]),
        "side": np.array([float(k[1]) for k in keys]),
        "y_labels": list(watch.CLASSES),
    }


def save(path: Path, held: object) -> Path:
    np.save(path, np.array(held, dtype=object), allow_pickle=True)
    return path


def with_pickle(path: Path, body: bytes) -> Path:
    """A .npy of objects whose pickle is `body`."""
    whole = save(path, {"a": 1}).read_bytes()
    path.write_bytes(whole[: whole.index(b"\x80\x04")] + body)
    return path


def test_load(tmp_path: Path) -> None:
    held = content()
    loaded = watch.load(save(tmp_path / watch.FILE, held))
    assert len(loaded) == 140 and len({r.name for r in loaded}) == 140
    for r, x, y, s, d in zip(loaded, held["X"], held["y"], held["subject"], held["side"], strict=True):
        assert np.array_equal(r.x, x.astype(np.float32)) and r.x.dtype == np.float32
        assert set(r.y) == {y} and (r.subject, r.place) == (s, f"side{int(d)}")


@pytest.mark.parametrize("protocol", [0, 2, 3, 4])
def test_every_pickle_protocol_and_layout(tmp_path: Path, protocol: int) -> None:
    held = content(60)
    held["X"] = [
        np.asfortranarray(x).astype(kind) for x, kind in zip(held["X"], ["<f4", ">f8", "<f8", "<i2"] * 35, strict=True)
    ]
    array = np.empty((), object)
    array[()] = held
    path = with_pickle(tmp_path / watch.FILE, pickle.dumps(array, protocol))
    for r, x in zip(watch.load(path), held["X"], strict=True):
        assert np.array_equal(r.x, x.astype(np.float32))


def test_old_numpy_names(tmp_path: Path) -> None:
    array = np.empty((), object)
    array[()] = content(60)
    old = pickle.dumps(array, 2).replace(b"numpy._core", b"numpy.core")
    assert len(watch.load(with_pickle(tmp_path / watch.FILE, old))) == 140


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def forged_dtype() -> bytes:
    """Objects whose bytes would be taken for pointers by numpy's own unpickling."""
    array = np.empty((), object)
    array[()] = {"X": 1}
    return pickle.dumps(array, 2).replace(b"X\x02\x00\x00\x00O8", b"X\x02\x00\x00\x00V8")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (pickle.dumps(Evil()), "it names posix.mkdir|it names nt.mkdir"),
        (b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "it names builtins.eval"),
        (b"cnumpy\nload\n(X\x01\x00\x00\x00atR.", "it names numpy.load"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.", "bytes in 'rot13'"),
        (forged_dtype(), "arrays of 'V8'"),
        (b"\x80\x04]", "not the expected .npy"),
        (b"", "not the expected .npy"),
        (b"(I1\nt.", "it holds a tuple"),
    ],
)
def test_nothing_a_pickle_names_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FloorplanError, match=says) as e:
        watch.load(with_pickle(tmp_path / watch.FILE, body))
    assert "\n" not in str(e.value) and not (tmp_path / "ran").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    def says(match: str) -> None:
        with pytest.raises(FloorplanError, match=match) as e:
            watch.load(path)
        assert "\n" not in str(e.value)

    path = tmp_path / watch.FILE
    says("no such file; fetch it first")
    np.save(path, np.zeros(3))
    says("it holds no objects")
    path.write_bytes(b"PK junk")
    says("not the expected .npy")
    save(path, {"X": [], "y": []})
    says("not seglearn's watch data")
    held = content(60)
    held["X"][3] = np.zeros((60, 5))
    save(path, held)
    says("series 3 has shape")
    held = content(60)
    held["y"] = held["y"][:-1]
    save(path, held)
    says("not seglearn's watch data")


def test_side_protocol(tmp_path: Path) -> None:
    recordings = watch.load(save(tmp_path / watch.FILE, content(600)))
    shift = watch.side_protocol(recordings, 8)

    def count(lengths: list[int], hop: int) -> int:
        return sum((n - 60) // hop + 1 for n in lengths if n >= 60)

    rows = [600 + 10 * y for y in range(7)]
    first = [int(0.8 * n) for n in rows]
    rest = [n - f for n, f in zip(rows, first, strict=True)]
    assert len(shift.source) == 6 * count(first, 30) and len(shift.adapt) == count(first, 30)
    assert len(shift.source_test) == 6 * count(rest, 15) and len(shift.test) == count(rest, 15)
    assert set(shift.source.subject) == set(watch.SOURCES) and set(shift.adapt.subject) == {8}
    assert all("side0" in r for r in shift.source.record) and all("side1" in r for r in shift.test.record)
    train = np.concatenate([r.x[: int(0.8 * len(r.y))] for r in recordings if r.subject <= 6 and r.place == "side0"])
    assert np.allclose(shift.scale.mean, train.mean(0), atol=1e-4)
    assert np.allclose(shift.scale.std, train.std(0), atol=1e-4)
    for target, says in ((3, "subject 3 is a source too"), (11, "0 target series")):
        with pytest.raises(FloorplanError, match=says):
            watch.side_protocol(recordings, target)


@pytest.mark.skipif(not REAL.exists(), reason="the real file has not been fetched into .data")
def test_counts_of_the_real_set() -> None:
    recordings = watch.load(REAL)
    assert len(recordings) == 140 and sum(len(r.y) for r in recordings) == 244_102
    shifts = {t: watch.side_protocol(recordings, t) for t in watch.TARGETS}
    assert [len(s.adapt) for s in shifts.values()] == [353, 320, 321, 344]
    assert [len(s.test) for s in shifts.values()] == [158, 141, 140, 152]
    assert {(len(s.source), len(s.source_test)) for s in shifts.values()} == {(1915, 845)}
    assert min(np.bincount(s.test.y, minlength=7).min() for s in shifts.values()) == 13


def fake_pip(monkeypatch: pytest.MonkeyPatch, data: bytes | None, code: int = 0) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if data is not None:
            wheel = Path(command[command.index("--dest") + 1]) / "seglearn-1.2.5-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("seglearn/__init__.py", "")
                archive.writestr(f"seglearn/data/{watch.FILE}", data)
        return subprocess.CompletedProcess(command, code, "", "first\nERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_fetch_takes_one_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, b"data")
    monkeypatch.setattr(watch, "SHA256", hashlib.sha256(b"data").hexdigest())
    path = watch.fetch(tmp_path / "new")
    assert path.read_bytes() == b"data" and [p.name for p in path.parent.iterdir()] == [watch.FILE]
    assert watch.fetch(tmp_path / "new") == path and len(calls) == 1
    assert {"--no-deps", "--only-binary", "seglearn==1.2.5"} <= set(calls[0])


def test_fetch_errors_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, b"other")
    with pytest.raises(FloorplanError, match="is not the one known"):
        watch.fetch(tmp_path)
    fake_pip(monkeypatch, None, code=1)
    with pytest.raises(FloorplanError, match="ERROR: no network"):
        watch.fetch(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(FloorplanError, match="choose another folder"):
        watch.fetch(tmp_path / "file" / "below")
