"""The source files and their rooms."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUND = {"errors", "files", "render", "torch_doors"}
FACE = {"", "__main__", "api", "testing"}  # what a user imports, under short names


def sources() -> Iterator[tuple[str, Path]]:
    """Each source file with its room; what lies in the root is a room of its own."""
    for top in ("floorplan", "passes", "cost_models"):
        for path in sorted((ROOT / top).rglob("*.py")):
            inside = path.relative_to(ROOT / top).parts
            if top == "floorplan" and inside[0] in ("passes", "cost_models"):
                continue  # links to the top folders
            own = inside[0].removesuffix(".py").replace("__init__", "")
            yield (own if top == "floorplan" else top), path
