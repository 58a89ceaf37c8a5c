"""Files written before the rooms, an adapted.pt of every method and layer and an emitted step.py, load and run."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import floorplan
from floorplan.store.modules import class_name, own_classes

FILES = Path(__file__).parents[1] / "files" / "before"
OUTPUTS: dict[str, list[float]] = json.loads((FILES / "outputs.json").read_text())
NAMES = sorted(p.stem for p in FILES.glob("*.pt"))
OWN = 22  # layers of ours that these files name
X = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapted_file_gives_the_same_outputs(name: str) -> None:
    model = floorplan.load(FILES / f"{name}.pt").eval()
    want = torch.tensor(OUTPUTS[name])
    assert torch.allclose(model(X).flatten(), want, rtol=1e-4, atol=1e-5)


def test_every_name_that_a_file_of_then_holds_is_still_a_layers() -> None:
    held = {class_name(m) for name in NAMES for m in floorplan.load(FILES / f"{name}.pt").modules()}
    assert len(held & set(own_classes())) == OWN


def test_an_emitted_step_gives_the_gradients_of_autograd() -> None:
    spec = importlib.util.spec_from_file_location("step_before", FILES / "step.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = floorplan.load(FILES / "memflora.pt").double().eval()
    x, y = X.double(), torch.tensor([1, 2])

    def loss(out: Any, target: Any) -> Tensor:
        return F.cross_entropy(out, target)

    module.make_step(model, loss)((x,), y)
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    loss(model(x), y).backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys() and len(want) > 0
    for n, g in want.items():
        assert (got[n] - g).abs().max() <= 1e-10 * g.abs().max()
