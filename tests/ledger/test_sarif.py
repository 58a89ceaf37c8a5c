"""Guilty tensors for code-scanning views."""

import json
from pathlib import Path

import pytest
from command import SIZE, SMOOTH, run


def test_sarif_names_every_guilty_tensor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "r.sarif"
    run(capsys, "check", SMOOTH, *SIZE, "--rank", "2", "--sarif", str(target))
    code, out, _ = run(capsys, "check", SMOOTH, *SIZE, "--rank", "2", "--sarif", "-")
    assert json.loads(out) == json.loads(target.read_text())
    results = json.loads(target.read_text())["runs"][0]["results"]
    assert [r["ruleId"] for r in results] == ["above-floor/activation"]
