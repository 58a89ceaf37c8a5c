"""The gate: every listed model is held to the floor, and faults of the list are told."""

from pathlib import Path

import pytest
from command import RESIDUAL, run


def test_gate_checks_every_listed_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry = f'[[tool.floorplan.gate]]\nmodel = "{RESIDUAL}"\nrank = 2\nsites = "all"\ninput = [3, 16, 16]\n'
    config = tmp_path / "pyproject.toml"
    config.write_text(entry)
    code, out, _ = run(capsys, "gate", str(config))
    assert code == 0 and out.startswith("ok") and "AT_FLOOR in train mode" in out and "\n     assumes: " in out
    config.write_text(entry + "max_saved = 10\n")
    code, out, _ = run(capsys, "gate", str(config))
    assert code == 1 and "more than 10" in out
    broken = '[[tool.floorplan.gate]]\nmodel = "no.such:factory"\n'
    config.write_text(broken + entry)
    code, out, _ = run(capsys, "gate", str(config))
    assert code == 1 and out.count("FAIL") == 1 and "\nok  " in out
    config.write_text(entry.replace("rank = 2", 'rank = "2"'))
    code, _, err = run(capsys, "gate", str(config))
    assert code == 2 and "`rank` must be a whole number" in err
    config.write_text(entry.replace("rank", "rnak"))
    assert run(capsys, "gate", str(config))[0] == 2
