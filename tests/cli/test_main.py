"""The commands end to end: exit codes, one-line errors, outputs whole or not at all."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import HERE, RESIDUAL, SIZE, SMOOTH, run
from small import Residual
from torch import Tensor, nn

import floorplan


def test_check_prints_the_verdict_and_exits_1_above_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", RESIDUAL, *SIZE, "--measure")
    assert code == 1 and "verdict: ABOVE_FLOOR" in out and not err
    assert "difference" in out and "C1" in out


def test_check_with_rank_exits_0_at_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", RESIDUAL, *SIZE, "--rank", "2", "--sites", "all")
    assert code == 0 and "verdict: AT_FLOOR" in out


def test_json_holds_all_that_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    code, out, _ = run(capsys, "check", RESIDUAL, *SIZE, "--measure", "--json", str(target))
    document = json.loads(target.read_text())
    assert document["schema"] == "floorplan.check/1" and document["verdict"] == "ABOVE_FLOOR"
    assert document["predicted"]["saved"] == document["measured"]["saved"]
    assert set(document["difference"].values()) == {0}
    assert f"{document['predicted']['saved']:,}" in out
    assert all(t["expr"] and t["shape"] is not None for t in document["tensors"])
    code, out, _ = run(capsys, "check", RESIDUAL, *SIZE, "--json", "-")
    assert json.loads(out)["batch"] == 2


REPORTS = (
    ("check", RESIDUAL, *SIZE),
    ("rewrite", RESIDUAL, *SIZE, "-o", "adapted.pt", "--force"),
    ("compare", RESIDUAL, *SIZE, "--methods", "full,memflora"),
    ("remat", SMOOTH, *SIZE, "-o", "adapted.pt", "--force"),
    ("why", RESIDUAL, "conv", *SIZE),
)


@pytest.mark.parametrize("command", REPORTS, ids=lambda c: c[0])
def test_every_report_is_written_in_every_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *command, "--json", "r.json", "--csv", "r.csv", "--markdown", "r.md")
    assert code < 2 and out and not err
    assert json.loads(Path("r.json").read_text())["schema"] == f"floorplan.{command[0]}/1"
    assert Path("r.md").read_text().startswith("# ")
    header, *rows = csv.reader(Path("r.csv").read_text().splitlines())
    assert rows and len(set(header)) == len(header) and {len(row) for row in rows} == {len(header)}
    assert not any(re.fullmatch(r"[\d,]+ B|\d+,[\d,]+|-", cell) for row in rows for cell in row)
    assert {p.name for p in tmp_path.iterdir()} - {"adapted.pt", "adapted.report.json", "adapted.report.md"} == {
        "r.json", "r.csv", "r.md"
    }  # fmt: skip
    assert run(capsys, *command, "--csv", "-")[1] == Path("r.csv").read_text()


@pytest.mark.parametrize("command", REPORTS, ids=lambda c: c[0])
def test_no_output_goes_over_another_or_over_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "small.py"
    model.write_text((HERE / "small.py").read_text())
    own = [a.replace(str(HERE / "small.py"), str(model)) for a in command]
    files = ["r.json", str(model), *(["adapted.pt"] if "-o" in command else [])]
    for path in files:
        code, _, err = run(capsys, *own, "--csv", "r.json", "--json", path)
        assert code == 2 and "is the model or another output" in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["small.py"]
    assert model.read_text() == (HERE / "small.py").read_text()


def test_rewrite_writes_model_and_reports_and_refuses_to_overwrite(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "adapted.pt"
    command = ("rewrite", RESIDUAL, *SIZE, "-o", str(target), "--rank", "2", "--sites", "all")
    code, out, _ = run(capsys, *command)
    assert code == 0 and "ABOVE_FLOOR -> AT_FLOOR" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapted.pt", "adapted.report.json", "adapted.report.md"]
    assert json.loads((tmp_path / "adapted.report.json").read_text())["schema"] == "floorplan.rewrite/1"
    assert torch.load(target, weights_only=True)["format"] == "floorplan.adapted/1"
    code, out, err = run(capsys, *command)
    assert code == 2 and err.count("\n") == 1 and "--force" in err
    assert run(capsys, *command, "--force")[0] == 0
    code, out, _ = run(capsys, "check", str(target), "--rank", "2", *SIZE, "--measure")
    assert code == 0 and "AT_FLOOR" in out


def test_why_explains_a_node_and_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "why", RESIDUAL, "conv", *SIZE)
    assert code == 0 and "pillar   convolution" in out and "4*B*C1*H" in out
    code, out, _ = run(capsys, "why", SMOOTH, "act", *SIZE, "--rank", "2")
    assert code == 0 and "left alone" in out and "SiLU" in out
    code, _, err = run(capsys, "why", RESIDUAL, "nowhere", *SIZE)
    assert code == 2 and "no node or module of that name" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "no_such.pt"), "no_such.pt"),
        (("check", RESIDUAL, "--input", "three"), "not a shape"),
        (("check", RESIDUAL, "--input", "5,16,16"), "stem"),
        (("check", RESIDUAL, *SIZE, "--autocast", "int8"), "autocast"),
        (("check", RESIDUAL, *SIZE, "--mode", "half"), "mode"),
        (("rewrite", RESIDUAL, *SIZE, "-o", "/no/such/folder/a.pt"), "folder"),
        (("rewrite", RESIDUAL, *SIZE, "-o", "x.pt", "--rank", "99"), "no conv was adapted"),
        (("gate", "no.toml"), "no.toml"),
        (("check",), "argument"),
        (("chek", RESIDUAL), "chek"),
        (("check", RESIDUAL, "--rank", "0"), "--rank"),
        (("check", RESIDUAL, "--allow", "no_such_package"), "no_such_package"),
        (("check", RESIDUAL, "--nope"), "--nope"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert err.startswith("floorplan: ") and err.count("\n") == 1 and says in err
    assert not list(tmp_path.iterdir())


def test_a_saved_model_file_is_checked_and_a_hostile_one_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    torch.save(net, tmp_path / "m.pt")
    assert run(capsys, "check", str(tmp_path / "m.pt"), *SIZE)[0] == 1
    torch.save(Residual(), tmp_path / "own.pt")  # a class of no installed package
    code, _, err = run(capsys, "check", str(tmp_path / "own.pt"), *SIZE)
    assert code == 2 and "Residual" in err and err.count("\n") == 1


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "floorplan", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "rewrite" in done.stdout


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


class Head(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.c(x)).mean((2, 3)))


class TakesDict(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.c, self.d, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(9, 8, 1), nn.Linear(8, classes)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        y = torch.relu(self.c(batch["image"]))
        y = torch.relu(self.d(torch.cat([y, batch["mask"][:, :, 1:-1, 1:-1]], 1)))
        return {"logits": self.head(y.mean((2, 3)))}


def test_a_dict_of_inputs_goes_through_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, sizes = f"{__name__}:TakesDict", ["--input", "image=3,16,16", "--input", "mask=1,16,16"]
    adapted = str(tmp_path / "a.pt")
    assert run(capsys, "check", model, *sizes, "--rank", "2")[0] == 0
    assert run(capsys, "rewrite", model, *sizes, "-o", adapted)[0] == 0
    code, out, _ = run(capsys, "check", adapted)  # which knows its inputs
    assert code == 0 and 'input [{"image": [3, 16, 16], "mask": [1, 16, 16]}] as recorded' in out
    assert run(capsys, "plan", adapted, "--budget", "4MB", "--batch", "4")[0] == 0
    assert run(capsys, "merge", adapted, "-o", str(tmp_path / "m.pt"))[0] == 0
    config = tmp_path / "pyproject.toml"
    entry = f'[[tool.floorplan.gate]]\nmodel = "{model}"\nrank = 2\ninput = '
    config.write_text(entry + "{image = [3, 16, 16], mask = [1, 16, 16]}\n")
    assert run(capsys, "gate", str(config))[0] == 0
    config.write_text(entry + '{image = [3, 16, 16], mask = "1"}\n')
    code, _, err = run(capsys, "gate", str(config))
    assert code == 2 and "`input` must be a list" in err


def test_a_head_of_its_own_is_kept_by_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights, adapted = str(tmp_path / "w.pt"), str(tmp_path / "a.pt")
    torch.save(Head(7).state_dict(), weights)
    given = [f"{__name__}:Head", "--input", "3,16,16", "--weights", weights]
    code, _, err = run(capsys, "check", *given)
    assert code == 2 and "--keep-head keeps the model's own" in err
    given.append("--keep-head")
    assert run(capsys, "rewrite", *given, "-o", adapted)[0] == 0
    into = ["merge", adapted, "-o", str(tmp_path / "m.pt"), "--into", given[0], "--weights", weights]
    assert run(capsys, *into)[0] == 2 and run(capsys, *into, "--keep-head")[0] == 0
    assert run(capsys, "merge", adapted, "-o", str(tmp_path / "n.pt"), "--keep-head")[0] == 2
    config = tmp_path / "pyproject.toml"
    entry = f'[[tool.floorplan.gate]]\nmodel = "{given[0]}"\nrank = 2\ninput = [3, 16, 16]\nweights = "{weights}"\n'
    config.write_text(entry + "keep_head = true\n")
    assert run(capsys, "gate", str(config))[0] == 0
    config.write_text(entry)
    assert run(capsys, "gate", str(config))[0] == 1
