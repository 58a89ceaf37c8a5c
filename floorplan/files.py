"""Names of files as users give them, and outputs written whole or not at all."""

import io
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from floorplan.errors import FloorplanError


def ensure_writable(path: str | Path, force: bool) -> Path:
    """The path, if a file may be put there."""
    target = Path(path)
    if "\0" in str(path):
        raise FloorplanError(f"{str(path)[:80]!r}: not a usable file name")
    try:
        if target.is_dir():
            raise FloorplanError(f"{target}: is a folder; name a file")
        if target.exists() and not force:
            raise FloorplanError(f"{target}: exists already; --force overwrites it")
        if not target.parent.is_dir():
            raise FloorplanError(f"{target}: its folder does not exist; create it first")
    except (OSError, ValueError) as e:
        raise FloorplanError(f"{str(path)[:80]}: not a usable file name ({e.__class__.__name__})") from e
    if len(target.name.encode()) > 200:
        raise FloorplanError(f"{str(path)[:80]}…: the name is too long; choose a shorter one")
    try:  # permissions alone do not tell: a folder may take no files at all
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as e:
        raise FloorplanError(f"{target}: its folder takes no file ({e.strerror}); choose another place") from e


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A draft in the target's folder to write to: it takes the target's name at the end, or is gone."""
    draft = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, *, force: bool = True) -> None:
    """`write_bytes` of text."""
    write_bytes(path, text.encode("utf-8"), force=force)


def write_bytes(path: str | Path, data: bytes, *, force: bool = True) -> None:
    """Write to a temporary file in the same folder, then rename; a device or pipe is written as it is."""
    target = ensure_writable(path, force).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        with whole(target) as draft:
            draft.write_bytes(data)
    except OSError as e:
        raise FloorplanError(f"{path}: {e.strerror}; choose another place") from e


def ensure_drawable(path: str | Path, force: bool = True) -> Any:
    """matplotlib's pyplot, if a picture can go to the path; to be asked before anything is computed."""
    if ensure_writable(path, force).suffix not in (".png", ".svg", ".pdf"):
        raise FloorplanError(f"{path}: name a .png, .svg or .pdf file")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as e:
        raise FloorplanError("plots: matplotlib is not installed; pip install matplotlib") from e
    return pyplot


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure of pyplot as its name says, the same bytes each time, and close it."""
    pyplot, suffix, buffer = ensure_drawable(path), Path(path).suffix[1:], io.BytesIO()
    try:
        with pyplot.rc_context({"svg.hashsalt": "floorplan"}):
            figure.savefig(buffer, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    except ValueError as e:
        raise FloorplanError(f"{path}: {e}") from e
    finally:
        pyplot.close(figure)
    write_bytes(path, buffer.getvalue())


_CALL = re.compile(r"(.+?:[\w.]+)(\(.*\))", re.DOTALL)  # where:name(arguments)


def split_factory(spec: str) -> tuple[str, str, str]:
    """`where:name(arguments)` as (where, name, "(arguments)"); without arguments the last is empty."""
    call = _CALL.fullmatch(spec)
    where, _, name = (spec if call is None else call[1]).rpartition(":")
    return where, name, "" if call is None else call[2]
