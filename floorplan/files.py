"""Write outputs whole or not at all."""

import os
import tempfile
from pathlib import Path

from floorplan.errors import FloorplanError


def ensure_writable(path: str | Path, force: bool) -> Path:
    """The path, if a file may be put there."""
    target = Path(path)
    if target.is_dir():
        raise FloorplanError(f"{target}: is a folder; name a file")
    if target.exists() and not force:
        raise FloorplanError(f"{target}: exists already; --force overwrites it")
    if not target.parent.is_dir():
        raise FloorplanError(f"{target}: its folder does not exist; create it first")
    try:  # permissions alone do not tell: a folder may take no files at all
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as e:
        raise FloorplanError(
            f"{target}: its folder takes no file ({e.strerror}); choose another place"
        ) from e


def write_text(path: str | Path, text: str, *, force: bool = True) -> None:
    """Write to a temporary file in the same folder, then rename."""
    target = ensure_writable(path, force)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as e:
        raise FloorplanError(f"{target}: {e.strerror}; choose another place") from e
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
