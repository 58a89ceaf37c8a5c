"""floorplan: which tensors a CNN keeps for its backward pass, and the rewrite to the memory floor."""

# After these imports the names are the functions, also where a submodule has the same name.
from floorplan.adapt import adapt
from floorplan.api import check, load, measure, rewrite, save
from floorplan.calibrate import calibrate
from floorplan.compare import compare
from floorplan.errors import FloorplanError
from floorplan.merge import merge

__all__ = [
    "FloorplanError", "adapt", "calibrate", "check", "compare", "load", "measure", "merge",
    "rewrite", "save",
]  # fmt: skip
