"""`floorplan.step_run` of a step.py written by 0.1: see floorplan.step.runner."""

from floorplan.step.runner import Runner, Stage

__all__ = ["Runner", "Stage"]
