"""floorplan: which tensors a CNN keeps for its backward pass, and the rewrite to the memory floor."""

# After these imports the names are the functions, also where a submodule has the same name.
from floorplan.api import check, load, measure, rewrite, save
from floorplan.errors import FloorplanError

__all__ = ["FloorplanError", "check", "load", "measure", "rewrite", "save"]
