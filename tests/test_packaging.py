"""What pyproject says is what lies on disk."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import floorplan
import floorplan.data
from floorplan.cli.main import app

ROOT = Path(__file__).parent.parent


def test_every_package_folder_is_mapped() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        str(p.parent.relative_to(ROOT))
        for top in ("floorplan", "passes", "cost_models")
        for p in (ROOT / top).rglob("__init__.py")
        if not p.parent.is_symlink()
    }
    found = {f for f in found if not f.startswith(("floorplan/passes", "floorplan/cost_models"))}
    assert set(tool["package-dir"].values()) == found
    assert set(tool["packages"]) == set(tool["package-dir"])


def test_files_stay_short() -> None:
    long = {
        str(p): n
        for top in ("floorplan", "passes", "cost_models")
        for p in (ROOT / top).rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 300
    }
    assert not long


def many_arguments(most: int) -> Iterator[str]:
    """Functions with more arguments than that, apart from the public face: what users call, and the commands."""
    named = [getattr(m, n) for m in (floorplan, floorplan.data) for n in m.__all__]
    face = {(f.__module__, f.__name__) for f in [*named, *(c.callback for c in app.registered_commands)]}
    for top in ("floorplan", "passes", "cost_models"):
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(("floorplan", *path.relative_to(ROOT / top).with_suffix("").parts))
            for n in ast.walk(ast.parse(path.read_text())):
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and (module, n.name) not in face:
                    own = [a.arg for a in (*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs)]
                    if len([a for a in own if a not in ("self", "cls", "ctx")]) > most:
                        yield f"{module}.{n.name}"


def test_requests_are_values() -> None:
    # Left are torch's own signatures: the ops of windows, autograd Functions, and a fused LSTM's.
    found = list(many_arguments(6))
    assert len(found) <= 10, found
