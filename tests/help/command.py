"""One command in this process, and the models that commands are told."""

import sys
from pathlib import Path

import pytest

from floorplan.cli import main as cli

HERE = Path(__file__).parents[1] / "nets"
RESIDUAL = f"{HERE / 'small.py'}:residual"
SMOOTH = f"{HERE / 'small.py'}:smooth"
SIZE = ("--input", "3,16,16", "--batch", "2")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command, in this process."""
    old, sys.argv = sys.argv, ["floorplan", *arguments]
    try:
        cli.main()
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    finally:
        sys.argv = old
    out = capsys.readouterr()
    return code, out.out, out.err
