"""`floorplan plan` on the command line: exit codes, files, one-line refusals."""

import csv
import json
import pickle
import runpy
from pathlib import Path

import pytest
from plans import MACHINES

from floorplan.budget import clock as plan_time
from floorplan.cli import main as cli

SMALL = [f"{Path(__file__).parents[1] / 'nets' / 'small.py'}:residual", "--input", "3,16,16"]


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given rates of the machine: what is measured here is bytes."""
    import sys

    module = sys.modules["floorplan.budget.plan"]
    monkeypatch.setattr(module, "by_kind", lambda device, seconds: MACHINES)
    monkeypatch.setattr(plan_time, "SECONDS", 0.0)


def run(*args: str) -> int:
    """The exit code of `floorplan plan`."""
    with pytest.raises(SystemExit) as e:
        cli.main()
    return int(e.value.code or 0)


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the command with these arguments."""
    monkeypatch.setattr("sys.argv", ["floorplan", "plan", *SMALL, *args])
    return run()


def test_everything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "--json": "plan.json",
        "--csv": "plan.csv",
        "--markdown": "plan.md",
        "--emit": "step.py",
        "--html": "page.html",
        "--arena": "my arena.h",
        "--snapshot": "s.pickle",
        "--perfetto": "t.json",
        "--png": "t.png",
    }
    files = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    assert call(monkeypatch, "--budget", "120kB", "--batch", "16", "--measure", *files) == 0
    out = capsys.readouterr().out
    assert "choice: batch 16, rank 2" in out and "difference 0" in out and "peak" in out
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["schema"] == "floorplan.plan/1" and document["difference"] == {"requested_peak": 0}
    assert document["choice"]["total"] <= 120_000 < document["one_more"]
    assert {r["schedule"] for r in document["references"]} == {"full fine-tuning", "adapted, autograd, whole batch"}
    chosen = [r for r in csv.DictReader((tmp_path / "plan.csv").open()) if r["chosen"] == "1"]
    assert [int(r["total"]) for r in chosen] == [document["choice"]["total"]]
    assert "```\nchoice: batch 16, rank 2" in (tmp_path / "plan.md").read_text()
    assert callable(runpy.run_path(str(tmp_path / "step.py"))["make_step"])
    assert "within 120,000 bytes" in (tmp_path / "page.html").read_text()
    assert "my_arena" in (tmp_path / "my arena.h").read_text()
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["device_traces"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    peaks = [max(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(peaks) == document["choice"]["requested_peak"]


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(monkeypatch, "--budget", "60kB", "--batch", "16", "--emit", str(tmp_path / "step.py")) == 1
    assert "nothing fits: the smallest step (micro-batch 1" in capsys.readouterr().out
    assert not (tmp_path / "step.py").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--budget", "lots"), "--budget lots: not an amount of memory"),
        (("--budget", "1MB", "--rank", "two"), "--rank two: write whole numbers"),
        (("--budget", "1MB", "--arena", "a.txt"), "--arena a.txt: neither JSON nor a C header"),
        (("--budget", "1MB", "--loss", "hinge"), "--loss hinge: not known"),
        (("--budget", "1MB", "--html", "-"), "only a report can go to stdout"),
        (("--budget", "1MB", "--html", "/tmp/one", "--emit", "/tmp/one"), "is the model or another output"),
        (("--budget", "1MB", "--emit", SMALL[0].rpartition(":")[0]), "is the model or another output"),
    ],
)
def test_refusals_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    assert call(monkeypatch, *args) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_plan_is_taken_by_rewrite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import floorplan

    path, adapted = str(tmp_path / "plan.json"), str(tmp_path / "adapted.pt")
    assert call(monkeypatch, "--budget", "120kB", "--batch", "16", "--json", path) == 0
    monkeypatch.setattr("sys.argv", ["floorplan", "rewrite", *SMALL, "-o", adapted, "--plan", path])
    assert run() == 0
    model = floorplan.load(adapted)
    chosen = json.loads(Path(path).read_text())["choice"]["plan"]
    assert json.loads(json.dumps(floorplan.compile_step(model, "cross_entropy").schedule.as_dict())) == chosen
