"""Tables of numbers in text files: a fast reader, and the line to blame when it refuses."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from floorplan.errors import FloorplanError

Open = Callable[[], TextIO]


def opener(path: Path) -> Open:
    """Opens a text file; bytes that are no text become marks that no number holds."""
    return lambda: path.open(encoding="utf-8", errors="replace")


def read_table(
    open_text: Open, where: str, columns: int, delimiter: str | None = None, header: int = 0
) -> NDArray[np.float64]:
    """The (T, columns) numbers below `header` lines; one-line error with file and line else."""
    try:
        with open_text() as f, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty table: told below
            found = np.loadtxt(f, delimiter=delimiter, skiprows=header, comments=None, ndmin=2)
    except ValueError as e:
        raise _blame(open_text, where, columns, delimiter, header, str(e)) from e
    except OSError as e:
        raise FloorplanError(f"{where}: {e.strerror or e}; check that it can be read") from e
    if found.size == 0:
        raise FloorplanError(f"{where}: holds no rows; download it again")
    if found.shape[1] != columns:
        raise _blame(open_text, where, columns, delimiter, header, "wrong number of columns")
    return found


def require_labels(path: Path, raw: NDArray[np.float64], odd: NDArray[np.bool_], why: str) -> None:
    """A one-line error at the first row of a file whose label is odd; {} in `why` is that label."""
    if odd.any():
        row = int(odd.argmax())
        with opener(path)() as f:  # blank lines are no rows
            line = next(islice((n for n, text in enumerate(f, 1) if text.strip()), row, None))
        raise FloorplanError(f"{path}, line {line}: {why.format(f'{raw[row]:g}')}")


def _blame(
    open_text: Open, where: str, columns: int, delimiter: str | None, header: int, numpy_says: str
) -> FloorplanError:
    again = "download it again"
    with open_text() as f:
        for number, line in enumerate(f, 1):
            if number <= header or not line.strip():
                continue
            fields, at = line.split(delimiter), f"{where}, line {number}"
            if len(fields) != columns:
                return FloorplanError(f"{at}: {len(fields)} columns, not {columns}; {again}")
            for column, field in enumerate(fields):
                try:
                    float(field)
                except ValueError:
                    return FloorplanError(f"{at}: column {column}: {field.strip()[:40]!r} is not a number; {again}")
    return FloorplanError(f"{where}: {' '.join(numpy_says.split())[:120]}; {again}")


def folder_at(folder: str | Path, what: str) -> Path:
    """The folder, or a one-line error that names the data set looked for."""
    path = Path(folder)
    if not path.is_dir():
        raise FloorplanError(f"{path}: no such folder; name the folder that holds {what}")
    return path


def by_subject(
    files: Iterable[tuple[int, Path]], wanted: Collection[int] | None, where: Path, none: str
) -> list[tuple[int, Path]]:
    """(subject, file) of the wanted subjects (None: all) in order; a one-line error for no file at all, or of one."""
    found: dict[int, list[Path]] = {}
    for subject, path in files:
        found.setdefault(subject, []).append(path)
    if not found:
        raise FloorplanError(f"{where}: {none}")
    if missing := sorted(set(wanted or ()) - set(found)):
        raise FloorplanError(f"{where}: no files of subject {missing[0]}; it holds subjects {sorted(found)}")
    return [(s, p) for s in sorted(found if wanted is None else set(wanted)) for p in found[s]]


def require_unique(names: Sequence[str], where: Path) -> None:
    """A one-line error if two recordings have one name: the same file lies in two folders."""
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        raise FloorplanError(f"{where}: holds {twice[0]} twice; name one of its folders")
