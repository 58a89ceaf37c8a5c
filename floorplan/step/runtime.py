"""All that a written step.py may name: its one import from this package, so that moves break no file a user has.

from floorplan.step.runtime import *
"""

from floorplan.layers.activations import gate_of
from floorplan.step import ops as _ops
from floorplan.step import stream as _stream
from floorplan.step.ops import *  # noqa: F403
from floorplan.step.region import Region
from floorplan.step.runner import Runner, Stage
from floorplan.step.stream import *  # noqa: F403

__all__ = ["Region", "Runner", "Stage", "gate_of", *_ops.__all__, *_stream.__all__]
