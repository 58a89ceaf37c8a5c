"""`floorplan.step_ops` of a step.py written by 0.1: see floorplan.step.ops."""

from floorplan.step.ops import *  # noqa: F403
