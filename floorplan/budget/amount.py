"""An amount of memory as a user writes it."""

import re

from floorplan.errors import FloorplanError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(budget: str | int) -> int:
    """32MB (1e6), 32MiB (2^20), 33554432."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(budget))
    if isinstance(budget, bool) or not found or found[2].lower() not in _UNITS:
        raise FloorplanError(f"--budget {budget}: not an amount of memory; write 32MB, 32MiB or 33554432")
    n = int(float(found[1]) * _UNITS[found[2].lower()]) if found[2] or "." in found[1] else int(found[1])
    if n < 1:
        raise FloorplanError(f"--budget {budget}: a budget is a positive number of bytes")
    return n
