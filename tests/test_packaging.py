"""What pyproject says is what lies on disk."""

import ast
import importlib.util
import re
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


ELSEWHERE = {
    "floorplan/__main__.py": "run as a module by tests/cli/test_main.py",
    "floorplan/before": "old names of what moved: files written before load in tests/store/test_before.py",
}


def test_every_source_file_has_a_test_file_of_its_name() -> None:
    missing = []
    for top in ("floorplan", "passes", "cost_models"):
        for path in sorted((ROOT / top).rglob("*.py")):
            inside = path.relative_to(ROOT / top)
            linked = top == "floorplan" and inside.parts[0] in ("passes", "cost_models")
            if (
                path.name == "__init__.py"
                or linked
                or {top + "/" + str(p) for p in (inside, *inside.parents)} & ELSEWHERE.keys()
            ):
                continue
            room = inside.parent if top == "floorplan" else Path(top) / inside.parent
            if not (ROOT / "tests" / room / f"test_{path.name}").exists():
                missing.append(f"{top}/{inside}")
    assert not missing


def test_what_code_in_a_string_imports_is_there() -> None:
    """Code for other processes is not seen by linters."""
    pattern = re.compile(r"^\s*(?:from (floorplan[\w.]*) import|import (floorplan[\w.]*))", re.M)
    for folder in ("tests", "benchmarks", "examples", "floorplan", "passes"):
        for path in (ROOT / folder).rglob("*.py"):
            if (ROOT / "tests" / "files") not in path.parents:
                for names in pattern.findall(path.read_text()):
                    module = "".join(names)
                    assert importlib.util.find_spec(module) is not None, f"{path.relative_to(ROOT)} imports {module}"
