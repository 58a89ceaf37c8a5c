"""`floorplan.step_stream` of a step.py written by 0.1: see floorplan.step.stream."""

from floorplan.step.stream import *  # noqa: F403
