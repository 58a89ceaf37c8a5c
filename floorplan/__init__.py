"""floorplan: which tensors a CNN keeps for its backward pass, and the rewrite to the memory floor."""

from typing import TYPE_CHECKING, Any

from floorplan.errors import FloorplanError

if TYPE_CHECKING:
    from floorplan.api import check, load, measure, rewrite, save

__all__ = ["FloorplanError", "check", "load", "measure", "rewrite", "save"]


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; `floorplan --help` and tools that only look should not wait.
    if name in __all__:
        from floorplan import api

        return getattr(api, name)
    raise AttributeError(f"module 'floorplan' has no attribute {name!r}")
