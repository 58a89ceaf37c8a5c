"""adapted.pt: what goes in comes out, what is not data stays out, half a file never appears."""

import collections
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from documents import ZOO, image, round_trip, same, step, traced, with_leaf
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

import floorplan
from floorplan.errors import FloorplanError
from floorplan.store.artifact import load_artifact, save_artifact


@pytest.mark.parametrize("name", ZOO)
def test_round_trip(name: str, tmp_path: Path) -> None:
    gm = traced(name)
    back = round_trip(gm, tmp_path)
    assert back.code == gm.code
    assert [n.name for n in back.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert list(back.state_dict()) == list(gm.state_dict())
    assert [n for n, _ in back.named_buffers()] == [n for n, _ in gm.named_buffers()]
    flags = [{n: m.training for n, m in g.named_modules()} for g in (gm, back)]
    assert flags[0] == flags[1]
    out, grads, gx = step(gm)
    out2, grads2, gx2 = step(back)
    same(out, out2)
    same(grads, grads2)
    assert torch.equal(gx, gx2)
    same(dict(gm.named_buffers()), dict(back.named_buffers()))  # statistics moved alike


def test_read_without_any_class_admitted(tmp_path: Path) -> None:
    save_artifact(traced("recurrent"), tmp_path / "a.pt", {"rank": 2})
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "a.pt") == []
    document = torch.load(tmp_path / "a.pt", weights_only=True)
    assert document["format"] == "floorplan.adapted/1"
    assert {type(n["target"]) for n in document["graph"]} == {str}


def test_meta_comes_back(tmp_path: Path) -> None:
    meta = {"rank": 2, "sites": ["a", ("b", 1.5)], "none": None, "limit": float("inf")}
    back = round_trip(traced("residual"), tmp_path, meta)
    assert back.meta["floorplan"] == meta | {"sites": ["a", ["b", 1.5]]}
    again = tmp_path / "again.pt"
    save_artifact(back, again, back.meta["floorplan"])
    assert load_artifact(again).code == back.code


def test_plan_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FloorplanError, match="the plan is not JSON"):
        save_artifact(traced("residual"), tmp_path / "a.pt", {"x": image()})
    assert os.listdir(tmp_path) == []


def test_ordered_dict_output(tmp_path: Path) -> None:
    gm = traced("dict")
    output = next(n for n in gm.graph.nodes if n.op == "output")
    value: Any = output.args[0]
    with gm.graph.inserting_before(output):
        pairs = [("q", value["q"][0]), ("p", value["p"])]
        made = gm.graph.call_function(collections.OrderedDict, (pairs,))
    output.args = (made,)
    gm.recompile()
    out = round_trip(gm, tmp_path)(image())
    assert type(out) is collections.OrderedDict and list(out) == ["q", "p"]


@dataclass
class Out:
    logits: Tensor
    maps: Any = None


class Two(NamedTuple):
    logits: Tensor
    maps: Any


@dataclass
class Mapped(collections.OrderedDict[str, Any]):  # as the outputs of Hugging Face models are
    logits: Any = None
    maps: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.update({k: v for k, v in list(vars(self).items()) if v is not None})


class Returning(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.c, self.h = kind, nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.c(x))
        return {"out": self.kind(logits=self.h(y.mean((2, 3))), maps=(y, [y]))}


@pytest.mark.parametrize("kind", [Out, Two, Mapped])
def test_containers_of_any_class_are_data(kind: Any, tmp_path: Path) -> None:
    model, x = Returning(kind), torch.randn(2, 3, 8, 8)
    result = floorplan.rewrite(model, x, rank=2)
    floorplan.save(result.module, tmp_path / "a.pt")
    back = floorplan.load(tmp_path / "a.pt")
    want, got = result.module(x)["out"], back(x)["out"]
    assert type(want) is kind and type(got) is not kind and type(got).__name__ == kind.__name__
    assert torch.equal(got.logits, want.logits) and torch.equal(got.maps[1][0], want.maps[0])
    if kind is not Out:
        assert torch.equal(got[0], got.logits) and len(got) == 2
    if kind is Mapped:
        assert list(got) == ["logits", "maps"] and got["logits"] is got.logits and got.loss is None
    floorplan.save(back, tmp_path / "b.pt")  # what was loaded can be saved
    assert torch.equal(floorplan.load(tmp_path / "b.pt")(x)["out"].logits, want.logits)


def test_loading_leaves_the_random_state(tmp_path: Path) -> None:
    save_artifact(traced("recurrent"), tmp_path / "a.pt", {})
    state = torch.get_rng_state()
    load_artifact(tmp_path / "a.pt")
    assert torch.equal(state, torch.get_rng_state())


def test_map_location(tmp_path: Path) -> None:
    save_artifact(traced("residual"), tmp_path / "a.pt", {})
    back = load_artifact(tmp_path / "a.pt", "cpu")
    assert {p.device.type for p in back.parameters()} == {"cpu"}


# What is not data is refused by name, and no file appears.


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def helper(x: Tensor) -> Tensor:
    return x


def with_function(f: Any, *extra: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(f, (graph.placeholder("x"), *extra)))
    return fx.GraphModule(nn.Module(), graph)


def with_callable() -> fx.GraphModule:
    gm = with_function(torch.cat)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.args = (*node.args, helper)
    return gm


def hooked() -> nn.Module:
    m = nn.ReLU()
    m.register_forward_hook(lambda *a: None)
    return m


def patched(name: str, value: Any) -> nn.Module:
    m = nn.Conv2d(3, 3, 1)
    setattr(m, name, value)
    return m


def parametrized() -> nn.Module:
    m = nn.Conv2d(3, 3, 1)
    parametrize.register_parametrization(m, "weight", nn.Identity())
    return m


def tensor_hook() -> nn.Module:
    m = nn.Conv2d(3, 3, 1)
    m.weight.register_hook(lambda g: g)  # type: ignore[no-untyped-call]
    return m


def exotic(t: Any) -> fx.GraphModule:
    m = with_leaf(nn.ReLU())
    m.register_buffer("t", t)
    return m


REFUSED: dict[str, tuple[Callable[[], fx.GraphModule], str]] = {
    "custom class": (lambda: with_leaf(Custom()), r"module leaf .*Custom\) is not a torch.nn"),
    "hook": (lambda: with_leaf(hooked()), "module leaf: has forward_hooks"),
    "forward": (lambda: with_leaf(patched("forward", helper)), "leaf: its forward was replaced"),
    "method": (lambda: with_leaf(patched("_conv_forward", helper)), "leaf"),
    "stride": (lambda: with_leaf(patched("transposed", True)), "attribute transposed was changed"),
    "parametrized": (lambda: with_leaf(parametrized()), "module leaf: is parametrized"),
    "tensor hook": (lambda: with_leaf(tensor_hook()), "tensor leaf.weight: has a gradient hook"),
    "transformer": (lambda: with_leaf(nn.TransformerEncoderLayer(4, 2)), "module leaf"),
    "function": (lambda: with_function(helper), "graph node helper: calls .*helper, which is not"),
    "eval": (lambda: with_function(eval), "graph node eval_1: calls builtins.eval"),
    "getattr": (lambda: with_function(getattr, "__class__"), "__class__"),
    "callable": (with_callable, "a builtins.function is not plain"),
    "meta": (lambda: exotic(torch.ones(2, device="meta")), "tensor t: not a plain dense"),
    "sparse": (lambda: exotic(torch.eye(2).to_sparse()), "tensor t: not a plain dense"),
    "non-leaf": (lambda: exotic(torch.ones(2).requires_grad_() * 2), "tensor t: not a plain"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_data_is_refused(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(FloorplanError, match=message) as e:
        save_artifact(make(), tmp_path / "a.pt", {})
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == []


def test_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"mine")
    with pytest.raises(FloorplanError, match="already exists"):
        save_artifact(traced("residual"), path, {})
    assert path.read_bytes() == b"mine"
    save_artifact(traced("residual"), path, {}, force=True)
    assert load_artifact(path).code == traced("residual").code
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", ["save", "fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(
    stage: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")

    def fail(*args: Any) -> None:
        if stage == "save":
            args[1].write(b"half of it")
        raise error

    owner: Any = torch if stage == "save" else os
    monkeypatch.setattr(owner, stage, fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FloorplanError
    with pytest.raises(expected):
        save_artifact(traced("residual"), path, {}, force=True)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert path.read_bytes() == b"old"


def test_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FloorplanError, match="cannot be written"):
        save_artifact(traced("residual"), tmp_path / "none" / "a.pt", {})
