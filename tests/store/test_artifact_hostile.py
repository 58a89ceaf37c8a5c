"""A hostile adapted.pt runs nothing, and is refused in one line that names the entry."""

import copy
import os
import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import NETS, document, refused
from torch import fx, nn

import floorplan
from floorplan.errors import LoadError
from floorplan.store.artifact import decode, load_artifact


def test_process_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a))
    d = document()
    d["modules"].append({"path": "p", "class": "subprocess.Popen", "config": {"args": ["ls"]}, "training": True})
    refused(d, "subprocess.Popen")
    assert started == []


@pytest.mark.parametrize("damage", ["checksum", "geometry"])
def test_damage_that_shows_only_in_use_is_refused_on_loading(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "adapted.pt"
    source = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    result = floorplan.rewrite(source, torch.randn(2, 3, 8, 8), measured=False)
    floorplan.save(result.module, path)
    if damage == "checksum":
        weight = source[2].weight.detach().numpy().tobytes()
        path.write_bytes(path.read_bytes().replace(weight, weight[:-1] + bytes([weight[-1] ^ 1])))
    else:
        d = torch.load(path, weights_only=True)
        d["meta"]["input"] = [[2, 5, 8, 8]]
        torch.save(d, path)
    says = {"checksum": "does not match its checksum", "geometry": "its graph does not run"}
    with pytest.raises(LoadError, match=says[damage]) as e:
        floorplan.load(path)
    assert "\n" not in str(e.value)


def test_code_in_the_pickle_does_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(document() | {"meta": Payload()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    (tmp_path / "c.pt").write_bytes(b"not a model\n")
    torch.save({"weight": torch.ones(1)}, tmp_path / "d.pt")
    for name in ("a.pt", "b.pt", "c.pt", "d.pt", "missing.pt"):
        with pytest.raises(LoadError, match=name) as e:
            load_artifact(tmp_path / name)
        assert "\n" not in str(e.value)
    assert not (tmp_path / "ran").exists()


JUNK: list[Any] = [
    None,
    True,
    -1,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    "torch.relu",
    "__class__",
    "body.0",
    [],
    {},
    [[]],
    {"node": "x"},
    {"tuple": 1},
    {"dict": [[1]]},
    {"slice": []},
    {"dtype": "x"},
    {"device": "a b"},
    {"size": ["x"]},
    (1, 2),
    {"a": 1, "b": 2},
    torch.ones(2),
    b"x",
    "a\nb",
]


def mutate(value: Any, rng: random.Random) -> Any:
    """The value with one random place deleted, doubled, swapped or replaced by junk."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key: Any = rng.choice(keys)
        changed: Any = copy.copy(value)
        kind = rng.random()
        if kind < 0.08:
            del changed[key]
        elif kind < 0.12 and isinstance(changed, list):
            changed.insert(key, changed[rng.randrange(len(changed))])
        elif kind < 0.16:
            changed[rng.choice(list(keys))] = changed[key]
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    return rng.choice(JUNK)


@pytest.mark.parametrize("name", NETS)
def test_mutated_documents_load_or_are_refused(name: str) -> None:
    d = document(name) | {"meta": {"sites": ["a", {"b": 1}]}}
    rng = random.Random(name)
    failures = 0
    for _ in range(250):
        try:
            gm = decode(mutate(d, rng))
        except LoadError as e:
            failures += 1
            assert "\n" not in str(e) and str(e)
        else:
            assert isinstance(gm, fx.GraphModule)
    assert failures > 100
