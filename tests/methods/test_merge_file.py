"""The merge command: a file that loads, a state_dict of the source, refusals in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command import HERE, RESIDUAL, run
from graphs import randomize
from hard_nets import Conv
from merges import X, adapted, check, into_source
from small import Residual
from torch import fx, nn

import floorplan
from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapters
from floorplan.methods.merge import difference
from floorplan.methods.merge_file import delta_state


def saved(path: Path, method: str = "memflora") -> fx.GraphModule:
    gm = adapted(randomize(Residual()), X, method=method)
    floorplan.save(gm, path)
    return gm


def test_merge_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gm = saved(tmp_path / "adapted.pt")
    where = tmp_path / "merged.pt"
    code, out, err = run(capsys, "merge", str(tmp_path / "adapted.pt"), "-o", str(where))
    assert code == 0 and not err and len(out.splitlines()) == 1
    assert f"wrote {where}: 3 convs merged, largest relative difference" in out and "in float64" in out
    again = floorplan.load(where)
    assert difference(gm, again, (X,)) <= 1e-5 and not adapters(again)
    assert again.meta["floorplan"] == {"merged": True, "method": "memflora", "input": [[2, 3, 12, 12]]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapted.pt", "merged.pt"]
    assert floorplan.check(str(where)).exit_code == 1
    code, _, err = run(capsys, "merge", str(where), "-o", str(where))
    assert code == 2 and "exists already" in err
    code, _, err = run(capsys, "merge", str(where), "-o", str(where), "--force")
    assert code == 2 and "method memflora: is plain already: nothing to merge" in err
    second = floorplan.rewrite(floorplan.load(where), X, measured=False)
    assert len(adapters(second.module)) == 3


def test_merge_into_a_source_writes_its_state_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gm = adapted(Residual(), X)
    floorplan.save(gm, tmp_path / "adapted.pt")
    where = tmp_path / "weights.pt"
    command = ("merge", str(tmp_path / "adapted.pt"), "-o", str(where), "--into")
    code, out, err = run(capsys, *command, RESIDUAL)
    assert code == 0 and not err and "3 convs merged into a state_dict of" in out
    state = torch.load(where, weights_only=True)
    model = Residual()
    model.load_state_dict(state)
    assert difference(gm, model, (X,)) <= 1e-5
    other = {k: t + 1 if t.is_floating_point() else t for k, t in Residual().state_dict().items()}
    torch.save(other, tmp_path / "other.pt")
    options = ("--force", "--weights", str(tmp_path / "other.pt"))
    before = where.read_bytes()
    code, _, err = run(capsys, *command, RESIDUAL, *options)
    assert code == 2 and len(err.splitlines()) == 1 and "name the model, and the weights" in err
    code, _, err = run(capsys, *command, f"{HERE / 'small.py'}:smooth", "--force")
    assert code == 2 and "the source has no stem.weight" in err
    assert where.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapted.pt", "other.pt", "weights.pt"]


def test_merge_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "full.pt", "full")
    torch.save(Residual(), tmp_path / "source.pt")
    for arguments, words in (
        (("full.pt",), "method full: is plain already: nothing to merge"),
        (("none.pt",), "none.pt"),
        (("source.pt",), "source.pt"),
        (("full.pt", "--weights", "x.pt"), "belong to --into"),
    ):
        first = str(tmp_path / arguments[0])
        code, out, err = run(capsys, "merge", first, "-o", str(tmp_path / "out.pt"), *arguments[1:])
        assert code == 2 and not out and len(err.splitlines()) == 1 and words in err
        assert not (tmp_path / "out.pt").exists()


def test_what_trained_outside_the_sites_goes_into_the_state_dict() -> None:
    model = randomize(Residual()).double()
    gm = adapted(model, X.double(), method="lora-conv")
    head: Any = gm.get_submodule("fc")
    with torch.no_grad():
        head.weight.add_(1.0)
    gm.train()(X.double())  # the BatchNorms gather statistics
    assert into_source(model, gm.eval(), X) <= 1e-12
    head.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(FloorplanError, match="fc.extra trains, but the source has no such tensor"):
        delta_state(gm, model)


def test_adapters_of_convs_that_share_a_weight_do_not_fit_one_state_dict() -> None:
    model = nn.Sequential(Conv(4, 4, 1), Conv(4, 4, 1))
    model[1].weight = model[0].weight
    x = torch.randn(2, 4, 5, 5)
    gm = check(model, x)[0]
    with pytest.raises(FloorplanError, match="0 and 1 share one weight"):
        delta_state(gm, model)


def test_a_source_of_other_shapes_is_refused() -> None:
    gm = adapted(Residual(), X)
    with pytest.raises(FloorplanError, match="the source has no stem.weight of shape"):
        delta_state(gm, Residual(16))
