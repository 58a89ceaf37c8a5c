"""`floorplan.compact` of a step.py written by 0.1: see floorplan.layers.activations."""

from floorplan.layers.activations import gate_of

__all__ = ["gate_of"]
