"""`floorplan.step_region` of a step.py written by 0.1: see floorplan.step.region."""

from floorplan.step.region import Region

__all__ = ["Region"]
