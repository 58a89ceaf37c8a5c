"""What a user named, loaded, with inputs to run it on; what is neither is refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command import RESIDUAL
from small import Residual
from torch import nn

import floorplan
from floorplan.errors import FloorplanError, LoadError
from floorplan.methods.subject import DEFAULT_BATCH, Source, read_adapted, subject_of

X = torch.randn(2, 3, 12, 12)


def test_a_module_with_its_inputs_is_taken_as_it_is() -> None:
    model = Residual()
    s = subject_of(Source(model, X))
    assert s.model is model and s.name == "Residual" and s.inputs == (X,) and s.notes == ()
    assert subject_of(Source(model, [X, 3])).inputs == (X, 3)


def test_inputs_are_made_of_shapes_or_inferred() -> None:
    s = subject_of(Source(RESIDUAL, shapes=[(3, 16, 8)], batch=5))
    assert [tuple(t.shape) for t in s.inputs] == [(5, 3, 16, 8)] and s.name == f"{RESIDUAL} (Residual)"
    s = subject_of(Source(Residual()))
    assert s.inputs[0].shape[:2] == (DEFAULT_BATCH, 3) and "inferred from" in s.notes[0] and "--input" in s.notes[0]


def test_an_adapted_file_remembers_its_input(tmp_path: Path) -> None:
    floorplan.save(floorplan.rewrite(Residual(), X, rank=2, measured=False).module, tmp_path / "a.pt")
    s = subject_of(Source(str(tmp_path / "a.pt"), batch=3))
    assert tuple(s.inputs[0].shape) == (3, 3, 12, 12) and "as recorded when it was adapted" in s.notes[-1]
    assert type(read_adapted(tmp_path / "a.pt")).__name__ == "GraphModule"


def test_an_adapted_file_whose_parts_do_not_fit_is_refused(tmp_path: Path) -> None:
    gm: Any = floorplan.rewrite(Residual(), X, rank=2, measured=False).module
    gm.meta["floorplan"] |= {"input": [[2, 5, 12, 12]], "plain": True}
    floorplan.save(gm, tmp_path / "a.pt")
    with pytest.raises(LoadError, match="a.pt: its graph does not run on the inputs it records"):
        read_adapted(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "source,why",
    [
        (Source(Residual(), batch=0), "input: 0 is no size; batch and shapes are positive"),
        (Source(Residual(), shapes=[(3, -4, 4)]), "input: -4 is no size"),
        (Source(Residual), "model: the class Residual is no model; give an nn.Module instance"),  # type: ignore[arg-type]
        (Source(3), "model: a int is no model"),  # type: ignore[arg-type]
        (Source(torch.jit.script(nn.ReLU())), "model: a TorchScript module has no Python forward to trace"),
        (Source(Residual(), inputs=[X, {"a": object()}]), "inputs: a object among them; give tensors"),
        (Source("no/such.pt"), "no/such.pt"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_subject(source: Source, why: str) -> None:
    with pytest.raises(FloorplanError, match=f"^{why}") as e:
        subject_of(source)
    assert "\n" not in str(e.value)
