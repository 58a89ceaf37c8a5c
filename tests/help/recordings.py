"""Recordings whose rows are counted."""

import numpy as np

from floorplan.data.windows import Recording


def series(rows: int, name: str = "a", subject: int = 1, place: str = "p", label: int = 0) -> Recording:
    """Channel 0 counts rows, channel 1 is its negative."""
    t = np.arange(rows, dtype=np.float32)
    return Recording(name, np.stack([t, -t], 1), np.full(rows, label), subject, place)
