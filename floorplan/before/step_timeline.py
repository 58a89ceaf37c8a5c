"""`floorplan.step_timeline` of 0.1: see floorplan.step.timeline."""

from floorplan.step.timeline import measure, predict, whole_op_bound

__all__ = ["measure", "predict", "whole_op_bound"]
