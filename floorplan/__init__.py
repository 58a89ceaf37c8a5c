"""floorplan: which tensors a CNN keeps for its backward pass, and the rewrite to the memory floor."""

from pathlib import Path

from floorplan.api import check, load, measure, rewrite, save
from floorplan.budget.plan import plan
from floorplan.budget.remat.report import remat
from floorplan.errors import FloorplanError
from floorplan.graph.driver import Pass
from floorplan.layers.adapter import ConvAdapter
from floorplan.ledger.losses import loss
from floorplan.methods.calibrate import calibrate
from floorplan.methods.catalogue import Method, Options, register
from floorplan.methods.compare import compare
from floorplan.methods.merge import merge
from floorplan.methods.train import adapt
from floorplan.step.compile import Schedule, compile_step

__path__.append(str(Path(__file__).parent / "before"))  # module names that files written by 0.1 hold

__all__ = ["ConvAdapter", "FloorplanError", "Method", "Options", "Pass", "Schedule"]
__all__ += ["adapt", "calibrate", "check", "compare", "compile_step", "load", "loss", "measure", "merge", "plan"]
__all__ += ["register", "remat", "rewrite", "save"]
