"""Write outputs whole or not at all."""

import os
import tempfile
import uuid
from pathlib import Path

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
        raise FloorplanError(
            f"{target}: its folder takes no file ({e.strerror}); choose another place"
        ) from e


def write_text(path: str | Path, text: str, *, force: bool = True) -> None:
    """Write to a temporary file in the same folder, then rename; a device or pipe is written as it is."""
    target = ensure_writable(path, force).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        draft = target.with_name(f".{uuid.uuid4().hex}")
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as e:
        raise FloorplanError(f"{path}: {e.strerror}; choose another place") from e
