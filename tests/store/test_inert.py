"""What stands beside weights in a checkpoint is read as nothing: no class of it is imported, nothing of it runs."""

import argparse
import collections
import datetime
import enum
import functools
import io
import operator
import pathlib
import pickle
import sys
import types
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from floorplan.errors import LoadError
from floorplan.store.inert import Inert, Nothing, filled_with_items, is_harmful
from floorplan.store.load import load_model, load_weights
from floorplan.store.weights import is_state_dict


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


class Attributes(dict[str, Any]):
    """A dict with attributes, as hyperparameters are often kept in."""

    note = 1


class Names(list[str]):
    """A list of a class of its own."""


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, {"x": 2}


class Reduced:
    def __reduce__(self) -> Any:
        return operator.methodcaller("upper"), ("x",), None, iter([1, 2]), iter([("k", 3)])


class Color(enum.Enum):
    RED = 1


class Config:
    """A tree of nodes as configuration libraries pickle them: state by a dict, cycles to the parent."""

    def __init__(self) -> None:
        self.parent: Any = None
        self.content = {"lr": 0.1, "child": self}


class Callback:
    def __init__(self) -> None:
        self.best = torch.ones(2)
        self.seen = collections.defaultdict(list, {"a": [1]})
        self.when: Any = self.__init__  # type: ignore[misc]  # a bound method: pickled by getattr


def trained() -> torch.optim.Optimizer:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    return optimizer


BESIDE: dict[str, Callable[[], Any]] = {
    "namespace": lambda: argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=1)),
    "numpy scalar": lambda: np.float64(0.5),
    "numpy integers": lambda: {"epoch": np.int64(3), "best": np.float32(1.5), "flag": np.bool_(True)},
    "numpy array": lambda: np.arange(6).reshape(2, 3),
    "numpy strings": lambda: np.array(["a", "bc"]),
    "numpy objects": lambda: np.array([{"a": 1}, None], dtype=object),
    "numpy generator": lambda: np.random.default_rng(0).bit_generator.state,
    "path": lambda: pathlib.Path("runs/1"),
    "dates": lambda: [datetime.datetime.now(), datetime.timedelta(3), datetime.date.today()],
    "enum": lambda: Color.RED,
    "uuid and decimal": lambda: (uuid.uuid4(), Decimal("1.5"), 1 + 2j, frozenset({1}), {1, 2}, range(3)),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [1], "b": [torch.ones(1)]}),
    "nested defaultdict": lambda: collections.defaultdict(dict, {0: collections.defaultdict(int, {"x": 1})}),
    "deque": lambda: collections.deque([1, 2], maxlen=3),
    "attribute dict": lambda: Attributes(lr=0.1, betas=(0.9, 0.99), inner=Attributes(x=1)),
    "list of a class": lambda: Names(["a", "b"]),
    "slots": Slotted,
    "simple namespace": lambda: types.SimpleNamespace(x=[1, 2]),
    "partial": lambda: functools.partial(operator.add, 1),
    "cyclic config": Config,
    "callback": lambda: {"callbacks": {"checkpoint": {"best_model_score": torch.ones(())}, "own": Callback()}},
    "optimizer": trained,
    "optimizer state": lambda: trained().state_dict(),
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(trained(), 3),
    "a class": lambda: Config,
    "a function": lambda: operator.add,
    "a loss with buffers": lambda: nn.CrossEntropyLoss(weight=torch.ones(2)),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("what", BESIDE)
def test_weights_beside_anything(tmp_path: Path, what: str, new: bool) -> None:
    path, target = str(tmp_path / "c.ckpt"), net(2)
    torch.save({"hyper": BESIDE[what](), "state_dict": net(1).state_dict()}, path, _use_new_zipfile_serialization=new)
    notes = load_weights(target, path)
    assert "took the weights under the key 'state_dict'" in notes
    want = net(1).state_dict()
    assert all(torch.equal(t, want[k]) for k, t in target.state_dict().items())
    if "a loss" not in what:
        with pytest.raises(LoadError, match="a checkpoint with a state_dict under 'state_dict': name a factory"):
            load_model(path)


@pytest.mark.parametrize("new", [True, False])
def test_a_model_beside_anything(tmp_path: Path, new: bool) -> None:
    path = str(tmp_path / "c.pt")
    found = {"model": net(1), "args": argparse.Namespace(x=1), "opt": trained()}
    torch.save(found, path, _use_new_zipfile_serialization=new)
    loaded = load_model(path)
    assert type(loaded.module) is nn.Sequential
    (unread,) = [n for n in loaded.notes if n.startswith("left unread what is neither a tensor nor a layer: ")]
    assert "argparse.Namespace" in unread and "torch.optim.adam.Adam" in unread


@pytest.mark.parametrize("held", ["namespace", "defaultdict", "attribute dict", "list of a class", "path", "partial"])
def test_nothing_inert_gets_into_a_model(tmp_path: Path, held: str) -> None:
    """A layer that holds it would run with an empty one."""
    path, model = str(tmp_path / "c.pt"), net()
    model.config = {"deep": [BESIDE[held]()]}
    torch.save({"model": model}, path)
    with pytest.raises(LoadError, match="c.pt: refused .*(--trust|name a factory)"):
        load_model(path)


def test_a_whole_module_of_an_unknown_class_is_refused_by_its_name(tmp_path: Path) -> None:
    path = str(tmp_path / "c.pt")
    model = type("Own", (nn.Sequential,), {"__module__": __name__})
    globals()["Own"] = model
    torch.save({"ema": model(nn.Linear(2, 2)), "epoch": 1}, path)
    with pytest.raises(LoadError, match=r"refused .*test_inert\.Own.*--allow|refused .*test_inert\.Own"):
        load_weights(net(), path)


def test_no_module_is_imported_and_nothing_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surprise.py").write_text("open('ran', 'w').close()\nclass Thing: pass\n")
    monkeypatch.chdir(tmp_path)
    made = types.ModuleType("surprise")
    thing = type("Thing", (), {"__module__": "surprise"})
    made.Thing = thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "surprise", made)
    torch.save({"model": net(1).state_dict(), "thing": thing()}, "c.pt")
    monkeypatch.delitem(sys.modules, "surprise")
    load_weights(net(), "c.pt")
    assert "surprise" not in sys.modules and not (tmp_path / "ran").exists()


class Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("function", [eval, exec, __import__, open, "os.system", "subprocess.Popen", "runpy.run_path"])
def test_what_no_checkpoint_needs_is_refused_whatever_stands_beside(tmp_path: Path, function: Any, new: bool) -> None:
    import importlib

    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        function = getattr(importlib.import_module(module), name)
    path, ran = str(tmp_path / "c.pt"), tmp_path / "ran"
    found = {"state_dict": net(1).state_dict(), "x": Call(function, f"open({str(ran)!r}, 'w')")}
    torch.save(found, path, _use_new_zipfile_serialization=new)
    for load in (lambda: load_weights(net(), path), lambda: load_model(path)):
        with pytest.raises(LoadError, match="refused .*could run code"):
            load()
    assert not ran.exists()


@pytest.mark.parametrize("function", [getattr, setattr, operator.attrgetter, functools.reduce, map, type, vars])
def test_functions_of_objects_are_not_called(tmp_path: Path, function: Any) -> None:
    path, before = str(tmp_path / "c.pt"), dict(vars(torch.Tensor))
    found = {"state_dict": net(1).state_dict(), "x": Call(function, torch.Tensor, "add", torch.nn.Identity)}
    torch.save(found, path)
    load_weights(net(), path)
    assert dict(vars(torch.Tensor)) == before


def test_stand_ins_do_nothing() -> None:
    why = LoadError("why")
    thing = Inert(why, None)
    made = thing(1, 2)
    assert type(made) is Nothing and made.refusal is why and type(cast(Any, thing).__new__(thing, 1)) is Nothing
    made.__setstate__({"refusal": 3})
    assert made.refusal is why
    assert Inert(why, dict)(list) == {} and Inert(why, list)() == []


def test_harm_is_told_by_name() -> None:
    for name in ("os.system", "posix.system", "nt.system", "builtins.eval", "subprocess.Popen", "sys.exit"):
        assert is_harmful(name)
    for name in ("builtins.getattr", "builtins.complex", "pathlib.PosixPath", "collections.OrderedDict", "ospkg.Net"):
        assert not is_harmful(name)


def test_which_classes_are_filled_with_items() -> None:
    def of(value: Any) -> dict[str, type]:
        return filled_with_items(io.BytesIO(pickle.dumps(value, 2)))

    own = __name__
    assert of({"a": [1, 2]}) == {} and of(Config()) == {}
    assert of([Attributes(a=1), {"b": Attributes()}]) == {f"{own}.Attributes": dict}
    assert of(collections.defaultdict(list, {1: [2], 3: [4]})) == {"collections.defaultdict": dict}
    assert of((Names("ab"), Names("c"))) == {f"{own}.Names": list}
    shared = Attributes(a=1)
    assert of([shared, shared, {"x": shared}]) == {f"{own}.Attributes": dict}
    assert filled_with_items(io.BytesIO(b"\x80\x02sssu.")) == {} and filled_with_items(io.BytesIO(b"")) == {}
    assert not is_state_dict({"a": Nothing(LoadError("x"))})
