"""Read the pickle inside a .npy file of objects without numpy's own unpickling, which runs its code.

Four names are known, and none is numpy's: each stands for a small class here that keeps what it is
given. Only plain numbers become arrays; a forged dtype cannot turn bytes into pointers.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from floorplan.errors import FloorplanError


class _Dtype:
    """Stands for numpy.dtype: a code such as f8, and later its byte order."""

    def __init__(self, code: str, *_flags: object) -> None:
        if not re.fullmatch(r"O8?|b1|[iuf][1248]", code):
            raise pickle.UnpicklingError(f"arrays of {code!r}")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"byte order {state[1]!r}")
        self.order = state[1]


class _Array:
    """Stands for numpy.ndarray: filled by its state, read by `_plain`."""

    value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if dtype.code.startswith("O"):
            self.value = raw if shape else raw[0]
        else:
            flat = np.frombuffer(raw, dtype=np.dtype(dtype.order + dtype.code))
            self.value = flat.reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, codec: str) -> bytes:
    """Stands for _codecs.encode, the way old pickles spell bytes."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"bytes in {codec!r}")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def read_objects(path: Path) -> Any:
    """What a .npy of objects holds: dicts, lists, numbers, arrays of numbers; FloorplanError else."""
    try:
        with path.open("rb") as f:
            header = npy.read_array_header_1_0 if npy.read_magic(f) == (1, 0) else npy.read_array_header_2_0
            if not header(f)[2].hasobject:
                raise pickle.UnpicklingError("it holds no objects")
            return _plain(_Unpickler(f).load())
    except FileNotFoundError as e:
        raise FloorplanError(f"{path}: no such file; fetch it first") from e
    except Exception as e:  # a damaged pickle raises anything
        why = " ".join(str(e).split())[:100] or type(e).__name__
        raise FloorplanError(f"{path}: not the expected .npy ({why}); fetch it again") from e


def _plain(found: Any) -> Any:
    """`found` with arrays in place of stand-ins; each list and dict is looked at once."""
    seen: set[int] = set()

    def clean(value: Any) -> Any:
        if isinstance(value, _Array):
            value = value.value
        if isinstance(value, np.ndarray | str | int | float | bytes | None) or id(value) in seen:
            return value
        seen.add(id(value))
        if isinstance(value, dict):
            value.update({k: clean(v) for k, v in value.items()})
        elif isinstance(value, list):
            value[:] = [clean(v) for v in value]
        else:
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}")
        return value

    return clean(found)
