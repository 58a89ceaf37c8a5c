"""What pyproject says is what lies on disk."""

import tomllib
from pathlib import Path

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
