"""The command `floorplan remat`: what is written, and exit codes."""

from pathlib import Path

import pytest
from command import SMOOTH, run

import floorplan


def test_a_budget_that_is_met_is_written_and_one_that_is_not_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "a.pt"
    command = ("remat", SMOOTH, "--input", "3,16,16", "--batch", "2", "-o", str(target))
    code, out, err = run(capsys, *command, "--budget", "1kB")
    assert code == 1 and not target.exists() and not err and "budget 1,000 B: not met, nothing was written" in out
    code, out, _ = run(capsys, *command, "--budget", "100MB")
    assert code == 0 and target.exists() and floorplan.load(target) is not None
    assert run(capsys, *command)[0] == 2  # it is there
    code, _, err = run(capsys, *command, "--force", "--budget", "many")
    assert code == 2 and len(err.splitlines()) == 1 and "many" in err
