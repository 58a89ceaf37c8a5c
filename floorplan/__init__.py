"""floorplan: which tensors a CNN keeps for its backward pass, and the rewrite to the memory floor."""

# After these imports the names are the functions, also where a submodule has the same name.
from floorplan.adapt import adapt
from floorplan.api import check, load, measure, rewrite, save
from floorplan.calibrate import calibrate
from floorplan.compare import compare
from floorplan.compile_step import Schedule, compile_step
from floorplan.errors import FloorplanError
from floorplan.merge import merge
from floorplan.plan import plan
from floorplan.remat_report import remat

__all__ = [
    "FloorplanError", "Schedule", "adapt", "calibrate", "check", "compare", "compile_step", "load", "measure", "merge",
    "plan", "remat", "rewrite", "save",
]  # fmt: skip
