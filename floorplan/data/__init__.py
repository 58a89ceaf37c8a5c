"""Sensor data: four data sets read from disk, cut into windows, split so that no row is on two sides.

files -> loader -> Recording (T, C) -> Part (a stretch of rows) -> cut -> Windows (N, C, T)
"""

from floorplan.data.splits import Shift, make_shift
from floorplan.data.windows import Part, Recording, Windows, cut

__all__ = ["Part", "Recording", "Shift", "Windows", "cut", "make_shift"]
