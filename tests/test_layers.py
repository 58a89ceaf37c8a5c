"""The rooms of the package: imports go down only, and what a room keeps to itself stays in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rooms import FACE, GROUND, ROOT, sources

MAY: dict[str, set[str]] = {
    "cost_models": set(),
    "layers": set(),
    "graph": {"layers"},
    "store": {"layers"},
    "passes": {"layers", "graph"},
    "ledger": {"cost_models", "layers", "graph"},
    "methods": {"cost_models", "layers", "graph", "store", "passes", "ledger"},
    "timeline": {"cost_models", "layers", "graph", "ledger"},
    "step": {"layers", "graph", "ledger", "timeline"},
    "budget": {"cost_models", "layers", "graph", "passes", "ledger", "methods", "timeline", "step"},
    "cli": {"api", "cost_models", "ledger", "methods", "timeline", "step", "budget"},
    "data": set(),
    "before": {"layers", "step"},
    **{room: set() for room in GROUND},
    "api": {"layers", "graph", "store", "ledger", "methods", "step", "budget"},
    **{face: {"api", "budget", "step", "methods", "ledger", "store", "graph", "layers"} for face in FACE - {"api"}},
    "__main__": {"cli"},
}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from this package, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), a.name) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names)


def room_of(module: str, name: str) -> str | None:
    """The room that an import reaches into; None outside the package."""
    parts = module.split(".")
    if parts[0] != "floorplan":
        return None
    return parts[1] if len(parts) > 1 else name


def breaches() -> Iterator[str]:
    """Imports that do not go down, as `file -> room`."""
    for room, path in sources():
        rooms = {room_of(module, name) for module, name in imported(path)} - {None, room}
        for other in sorted(str(r) for r in rooms if r not in GROUND | MAY[room]):
            yield f"{path.relative_to(ROOT)} -> {other}"


def test_imports_go_down() -> None:
    assert not list(breaches())


def test_no_private_name_leaves_its_room() -> None:
    for room, path in sources():
        private = [f"{m}.{n}" for m, n in imported(path) if n.startswith("_") and room_of(m, n) not in (None, room)]
        assert not private, f"{path.relative_to(ROOT)} imports {private}"


def test_the_root_holds_the_face_and_the_ground_alone() -> None:
    names = {p.stem for p in (ROOT / "floorplan").glob("*.py")} - {"__init__"}
    assert names <= GROUND | FACE


def test_rooms_do_not_go_in_circles() -> None:
    """The table itself has no way back up."""
    above: set[str] = set()

    def visit(room: str) -> None:
        assert room not in above, f"{room} is above itself"
        above.add(room)
        for below in MAY[room]:
            visit(below)
        above.remove(room)

    for room in MAY:
        visit(room)


def test_late_imports_are_few() -> None:
    """Two imports inside functions at most: where loading must not wait for what it may not need."""
    late = []
    for _, path in sources():
        tree = ast.parse(path.read_text())
        for f in ast.walk(tree):
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
                late += [
                    path.name
                    for n in ast.walk(f)
                    if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("floorplan")
                ]
    assert len(late) <= 2, late
