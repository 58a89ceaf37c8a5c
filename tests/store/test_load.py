"""What a user may name as a model, what they are told when it is none, and damaged files."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from floorplan.errors import LoadError
from floorplan.store.load import load_model, load_weights, unwrapped


def error(spec: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.SyncBatchNorm(4))


def save(obj: object, path: Path, *, new: bool = True) -> str:
    torch.save(obj, path, _use_new_zipfile_serialization=new)
    return str(path)


@pytest.mark.parametrize("new", [True, False])
def test_a_saved_module_keeps_flags_mode_and_values(tmp_path: Path, new: bool) -> None:
    model = net()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    loaded = load_model(save(model, tmp_path / "m.pt", new=new))
    assert loaded.notes == () and loaded.source == f"{tmp_path / 'm.pt'} (Sequential)"
    got = loaded.module
    assert [m.training for m in got.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in got.parameters()] == [False] + [True] * 5
    for key, value in model.state_dict().items():
        assert torch.equal(got.state_dict()[key], value)


@pytest.mark.parametrize("new", [True, False])
def test_wrappers_and_dicts_are_opened_aloud(tmp_path: Path, new: bool) -> None:
    loaded = load_model(save(nn.DataParallel(net()), tmp_path / "m.pt", new=new))
    assert type(loaded.module) is nn.Sequential
    assert loaded.notes == ("unwrapped DataParallel: analysing the module inside",)
    loaded = load_model(save({"epoch": 1, "model": net()}, tmp_path / "m.pt", new=new))
    assert type(loaded.module) is nn.Sequential
    assert loaded.notes == ("took the model under the key 'model' of a dict",)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("obj", "says"),
    [
        (net().state_dict(), "holds a state_dict (12 tensors), no model: name a factory"),
        ({"model": net().state_dict(), "optimizer": {}}, "with a state_dict under 'model'"),
        ({"weights": net().state_dict()}, "with a state_dict under 'weights'"),
        (torch.ones(2), "holds a Tensor, not a model"),
        ([net()], "holds a list, not a model"),
        (None, "holds a NoneType, not a model"),
        ({"a": 1, 2: 3}, "holds a dict without a model in it (keys: a, int)"),
        ({}, "holds a dict without a model in it (keys: none)"),
    ],
)
def test_files_without_a_model(tmp_path: Path, obj: object, says: str, new: bool) -> None:
    assert says in error(save(obj, tmp_path / "m.pt", new=new))


def test_other_formats_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(net().state_dict(), path)
    assert "safetensors hold weights only: name a factory" in error(str(path))
    (tmp_path / "a.txt").write_text("hello")
    assert "looks like text" in error(str(tmp_path / "a.txt"))
    assert "is a folder" in error(str(tmp_path))
    assert "no such file; a factory is named pkg.mod:factory" in error("nowhere.pt")
    assert "cannot be read" in error("x" * 5000)


@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v2",
        "resnet18",
        "efficientnet_b0",
        "densenet121",
        "googlenet",
        "shufflenet_v2_x0_5",
        "mobilenet_v3_small",
        "convnext_tiny",
    ],
)
def test_torchvision_classifiers(tmp_path: Path, name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.get_model(name, weights=None)
    got = load_model(save(model, tmp_path / "m.pt")).module
    assert type(got) is type(model) and repr(got) == repr(model)
    small = models.resnet18(weights=None)
    got = load_model(save(small, tmp_path / "m.pt", new=False)).module
    assert got._norm_layer is nn.BatchNorm2d


FACTORIES = """
import torch
from torch import nn
from neighbour_of_factories import WIDTH

def build(): return nn.Conv2d(3, WIDTH, 1)
def defaults(width=5, *args, **kw): return nn.Conv2d(3, width, 1)
def needs(width, *, depth): return nn.Identity()
def number(): return 3
def fails(): raise ValueError("first\\nsecond")
def leaves(): raise SystemExit(1)
def wrapped(): return nn.DataParallel(nn.Conv2d(3, WIDTH, 1))
def scripted(): return torch.jit.script(nn.Identity())
class Net(nn.Module):
    @staticmethod
    def tiny(): return nn.Identity()
instance = nn.ReLU()
value = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "factories_ok.py").write_text(FACTORIES)
    (tmp_path / "neighbour_of_factories.py").write_text("WIDTH = 4")
    (tmp_path / "factories_syntax.py").write_text("def f(:\n")
    (tmp_path / "factories_import.py").write_text("import not_installed_anywhere")
    (tmp_path / "factories_exit.py").write_text("raise SystemExit('bye')")
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in set(sys.modules) - before:
        if "factories" in name:
            del sys.modules[name]


@pytest.mark.parametrize("where", ["factories_ok", "factories_ok.py", "./factories_ok.py", "ABS"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_factories(folder: Path, where: str) -> None:
    where = str(folder / "factories_ok.py") if where == "ABS" else where
    built = load_model(f"{where}:build")
    assert isinstance(built.module, nn.Conv2d) and built.source == f"{where}:build (Conv2d)"
    defaults: Any = load_model(f"{where}:defaults").module
    assert defaults.out_channels == 5
    assert isinstance(load_model(f"{where}:instance").module, nn.ReLU)
    assert type(load_model(f"{where}:Net").module).__name__ == "Net"
    assert isinstance(load_model(f"{where}:Net.tiny").module, nn.Identity)
    assert load_model(f"{where}:wrapped").notes[0].startswith("unwrapped DataParallel")
    for name, says in [
        ("needs", "needs arguments (width, depth)"),
        ("number", "returned a int, not a torch.nn.Module"),
        ("fails", "raised ValueError: first second"),
        ("leaves", "raised SystemExit: 1"),
        ("value", "a int, neither callable nor"),
        ("absent", "has no 'absent' (it has build, defaults"),
        ("scripted", "a TorchScript module"),
        ("", "not a file; a factory is named"),
    ]:
        assert says in error(f"{where}:{name}")


def test_factories_that_cannot_be_imported(folder: Path) -> None:
    for spec, says in [
        ("factories_syntax:f", "cannot import factories_syntax (SyntaxError"),
        ("factories_syntax.py:f", "cannot import factories_syntax.py (SyntaxError"),
        ("factories_import:f", "No module named 'not_installed_anywhere'"),
        ("factories_exit.py:f", "SystemExit: bye"),
        ("factories_none:f", "No module named 'factories_none'"),
        ("factories_none.py:f", "no such file"),
        ("some/where.pt:f", "no such file"),
        ("C:\\models\\m.pt", "no such file"),
        ("a:b/m.pt", "no such file"),
        (":f", "a factory is named"),
        (".relative:f", "is not the name of a module"),
    ]:
        assert says in error(spec), spec
    (folder / "data.bin").write_bytes(b"1")
    assert "is not Python source" in error("./data.bin:f")
    assert "name the factory in it: FILE.py:factory" in error("factories_ok.py")


def test_a_file_whose_name_has_a_colon(tmp_path: Path) -> None:
    assert type(load_model(save(net(), tmp_path / "a:b.pt")).module) is nn.Sequential


def test_weights_go_onto_a_factory(folder: Path) -> None:
    weights = nn.Conv2d(3, 4, 1).state_dict()
    save({f"module.{k}": v for k, v in weights.items()}, folder / "w.pt")
    loaded = load_model("factories_ok:build", weights="w.pt")
    assert loaded.notes == ("stripped the 'module.' prefix of 2 keys",)
    assert loaded.source == "factories_ok:build (Conv2d), weights w.pt"
    assert torch.equal(loaded.module.state_dict()["weight"], weights["weight"])
    assert "w.pt: does not fit the model" in error("factories_ok:instance", weights="w.pt")


def test_adapted_models_go_to_their_own_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    reader: Any = ModuleType("floorplan.store.artifact")
    graph = torch.fx.symbolic_trace(nn.ReLU())
    reader.load_artifact = lambda path, map_location, allow: graph
    monkeypatch.setitem(sys.modules, "floorplan.store.artifact", reader)
    path = save({"format": "floorplan.adapted/1"}, tmp_path / "adapted.pt")
    assert load_model(path).module is graph

    def broken(path: str, map_location: str, allow: Any) -> None:
        raise KeyError("graph")

    reader.load_artifact = broken
    assert "damaged adapted model (KeyError: 'graph')" in error(path)


def test_trust_reads_what_the_safe_reader_refuses(tmp_path: Path) -> None:
    odd: Any = nn.utils.spectral_norm(nn.Linear(2, 2))
    path = save(odd, tmp_path / "m.pt")
    assert "refused" in error(path)
    got: Any = load_model(path, trust=True).module
    assert torch.equal(got.weight_orig, odd.weight_orig)


def test_trust_on_garbage_is_still_one_line(tmp_path: Path) -> None:
    data = bytearray(Path(save(net(), tmp_path / "m.pt", new=False)).read_bytes())
    (tmp_path / "m.pt").write_bytes(data[:400])
    assert "cannot be loaded" in error(str(tmp_path / "m.pt"), trust=True)


class Payload:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.marker,)


def damaged(data: bytes, seed: int) -> bytes:
    """One seeded mutation: a cut, a burst of random bytes, or a copied piece; heads hit oftener."""
    rng = random.Random(seed)
    at = rng.randrange(len(data) if seed % 2 else min(len(data), 1500))
    if seed % 5 == 0:
        return data[:at]
    changed = bytearray(data)
    for i in range(rng.randrange(1, 5)):
        changed[(at + i) % len(data)] = rng.randrange(256)
    if seed % 5 == 1:
        source = rng.randrange(len(data))
        changed[at : at + 8] = data[source : source + 8]
    return bytes(changed)


@pytest.mark.parametrize("kind", ["zip", "legacy", "state", "hostile", "hostile legacy", "tensors"])
def test_damaged_files_load_or_say_so_in_one_line(tmp_path: Path, kind: str) -> None:
    path, marker = tmp_path / "m.pt", tmp_path / "ran"
    if kind == "tensors":
        save_file(net().state_dict(), path)
    elif kind == "state":
        save({"state_dict": net().state_dict()}, path)
    else:
        obj = [net(), Payload(str(marker))] if "hostile" in kind else net()
        save(obj, path, new="legacy" not in kind)
    data = path.read_bytes()
    outcomes = set()
    for seed in range(150):
        path.write_bytes(damaged(data, seed))
        for use in (load_model, lambda p: load_weights(net(), p)):
            try:
                use(str(path))
                outcomes.add("loaded")
            except LoadError as e:
                assert "\n" not in str(e) and 0 < len(str(e)) < 1000
                outcomes.add("refused")
    assert not marker.exists()
    assert "refused" in outcomes
    assert "loaded" in outcomes or "hostile" in kind


def test_every_single_byte_of_the_pickle(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    data = Path(save(nn.ReLU(), path, new=False)).read_bytes()
    for at in range(0, len(data), 3):
        for bit in (0x01, 0x80):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                load_model(str(path))
            except LoadError as e:
                assert "\n" not in str(e)


@pytest.mark.parametrize(
    ("call", "width"),
    [
        ("(width=7)", 7),
        ("(7)", 7),
        ("()", 5),
        ("(width = 7, other=[1, {'a': (None, True)}], note='a:b(c)')", 7),
        ("(7, -1.5, 1j)", 7),
    ],
)
@pytest.mark.parametrize("where", ["factories_ok", "factories_ok.py"])
def test_factories_with_literal_arguments(folder: Path, where: str, call: str, width: int) -> None:
    loaded = load_model(f"{where}:defaults{call}")
    assert loaded.module.out_channels == width and loaded.source == f"{where}:defaults{call} (Conv2d)"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("defaults(WIDTH)", "its arguments are not literals"),
        ("defaults(__import__('os').mkdir('ran'))", "its arguments are not literals"),
        ("defaults(*[7])", "its arguments are not literals"),
        ("defaults(**{'width': 7})", "its arguments are not literals"),
        ("defaults(7)(8)", "its arguments are not literals"),
        ("defaults(7", "no such file|has no"),
        ("defaults(width=)", "its arguments are not literals"),
        ("needs(3)", "cannot be called with these arguments .missing a required argument: 'depth'"),
        ("needs", "needs arguments .width, depth.; name a function without, or give literals: needs.width=…"),
        ("build(3)", "cannot be called with these arguments .too many positional"),
        ("number(1)", "cannot be called with these arguments"),
    ],
)
def test_arguments_that_are_none(folder: Path, call: str, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        load_model(f"factories_ok:{call}")
    assert not Path("ran").exists()


def test_wrappers_in_any_order_are_opened() -> None:
    inside = net()
    averaged = torch.optim.swa_utils.AveragedModel(torch.compile(nn.DataParallel(inside)))
    found, notes = unwrapped(averaged, "m")
    assert type(found) is nn.Sequential
    assert [n.split()[1] for n in notes] == ["AveragedModel:", "the", "DataParallel:"]
    assert unwrapped(inside, "m") == (inside, ())
