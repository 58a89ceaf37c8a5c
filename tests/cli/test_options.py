"""Options that commands share: how they are read, and one line for what cannot be."""

import sys
from pathlib import Path

import pytest
import torch

from floorplan.cli.options import MethodOptions, ModelOptions, Outputs, busy, dtype_of, names, numbers, shapes_of
from floorplan.errors import FloorplanError
from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.subject import Source


def test_words_numbers_and_shapes() -> None:
    assert names(" a, b ,,c ") == ["a", "b", "c"] and numbers("--ranks", "1, 2") == [1, 2]
    assert shapes_of(["3,16,8", "4x2"]) == [(3, 16, 8), (4, 2)] and shapes_of(None) is shapes_of([]) is None
    assert shapes_of(["a=3,4", "5", "b=6"]) == [{"a": (3, 4), "b": (6,)}, (5,)]
    assert [dtype_of(n) for n in (None, "bf16", "float16")] == [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "read,why",
    [
        (lambda: numbers("--ranks", "1,x"), "--ranks 1,x: write whole numbers, comma-separated"),
        (lambda: shapes_of(["3,4", "3,a"]), "--input 3,a: not a shape; write it as 3,224,224"),
        (lambda: shapes_of(["a=3,x"]), "--input a=3,x: not a shape; write it as 3,224,224"),
        (lambda: shapes_of(["3,4", "3,0"]), "--input 3,0: sizes must be positive"),
        (lambda: dtype_of("int8"), "--autocast int8: not known; use bf16 or fp16"),
    ],
)
def test_what_cannot_be_read(read: object, why: str) -> None:
    with pytest.raises(FloorplanError, match=f"^{why}$"):
        read()  # type: ignore[operator]


def test_options_are_requests() -> None:
    given = ModelOptions("m.pt", ["3,4"], "w.pt", ["pkg"], True)
    assert given.source(5) == Source("m.pt", None, 5, [(3, 4)], "w.pt", ["pkg"], True)
    assert ModelOptions("m.pt").source() == Source("m.pt")
    assert MethodOptions("all", 3, True, "lora-c").plan(4) == Plan("lora-c", Options(4, "all", 3, True))


def test_no_output_goes_over_the_model_or_another(tmp_path: Path) -> None:
    model, other = tmp_path / "m.pt", tmp_path / "a.json"
    model.write_text("mine")
    Outputs(json=str(other)).ready(str(model), None)
    for paths, files, taken in (
        ({"json": str(model)}, (), str(model)),
        ({"json": str(model)}, (), f"{model}:factory"),
        ({"json": str(other), "csv": str(other)}, (), "x"),
        ({"json": str(other)}, (str(other),), "x"),
    ):
        with pytest.raises(FloorplanError, match="is the model or another output; name a file of its own"):
            Outputs(**paths).ready(taken, files=files)
    for taken, files in ((("x",), ("-",)), (("x", "-"), ())):
        with pytest.raises(FloorplanError, match="only a report can go to stdout; name a file"):
            Outputs().ready(*taken, files=files)
    with pytest.raises(FloorplanError, match="one document alone can go to stdout"):
        Outputs(json="-", csv="-").ready("x")
    assert model.read_text() == "mine" and not other.exists()


def test_no_output_goes_over_the_source_of_a_named_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    for source in (tmp_path / "nets.py", tmp_path / "pkg" / "more.py"):
        source.write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "pkg"))
    for name, path in (("nets:res", "nets.py"), ("pkg.more:res", "pkg/more.py"), ("more:res", "pkg/more.py")):
        with pytest.raises(FloorplanError, match="is the model or another output"):
            Outputs(csv=path).ready(name)


def test_a_document_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("mine")
    with pytest.raises(FloorplanError, match="exists already"):
        Outputs(csv=str(path)).ready("x", force=False)
    Outputs(csv=str(path)).ready("x", force=True)


def test_what_a_models_forward_prints_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    with busy("looking"):
        print("from the forward")
    print("report", file=sys.stdout)
    out = capsys.readouterr()
    assert out.out == "report\n" and out.err == "from the forward\n"
