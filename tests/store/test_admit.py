"""Which packages a file's classes may come from, and what importing them may run."""

import importlib
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from floorplan.errors import LoadError
from floorplan.store.admit import is_plain, modern
from floorplan.store.load import load_model

HEAD = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, None))
CALL = b")R"


def g(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def s(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def write(path: Path, body: bytes) -> str:
    path.write_bytes(HEAD + b"\x80\x02" + body + b"." + pickle.dumps([], 2))
    return str(path)


def error(spec: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_names() -> None:
    for arg in (
        "torch float32",
        "torch FloatStorage",
        "torch.cuda HalfStorage",
        "__builtin__ set",
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
    ):
        assert is_plain(modern(arg)), arg
    for arg in (
        "torch load",
        "torch.serialization load",
        "torch.storage _load_from_bytes",
        "__builtin__ getattr",
        "torch nn",
        "torch.hub Storage",
        "os Storage",
    ):
        assert not is_plain(modern(arg)), arg


PACKAGE = """
import enum
import functools
from torch import nn
import torch.nn.functional as F
class Mode(enum.Enum):
    FAST = "fast"
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mode = nn.Conv2d(1, 2, 1), Mode.FAST
        self.act, self.kinds = F.relu, [(nn.ReLU,)]
    def forward(self, x):
        return self.act(self.conv(x))
class Helper:
    pass
def function():
    raise SystemExit("must not run")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "userpkg").mkdir()
    (tmp_path / "userpkg" / "__init__.py").touch()
    (tmp_path / "userpkg" / "net.py").write_text(PACKAGE)
    broken = "open('imported', 'w')\nraise ValueError('a\\nb')"
    (tmp_path / "userpkg" / "broken.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("userpkg.net")
    for name in [n for n in sys.modules if n.partition(".")[0] == "userpkg"]:
        del sys.modules[name]


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("allow", ["userpkg", "userpkg.net"])
def test_allow_admits_a_package(package: ModuleType, new: bool, allow: str) -> None:
    torch.save(package.Net(), "m.pt", _use_new_zipfile_serialization=new)
    assert "refused userpkg.net.Net: userpkg is not on the allow-list" in error("m.pt")
    assert "userpkg is not on" in error("m.pt", allow=["torch", "userpkg.net2"])
    net: Any = load_model("m.pt", allow=[allow]).module
    assert type(net) is package.Net
    assert net.mode is package.Mode.FAST and net.act is F.relu and net.kinds == [(nn.ReLU,)]
    assert net(torch.ones(1, 1, 2, 2)).shape == (1, 2, 2, 2)


def test_an_unlisted_package_is_not_even_imported(package: ModuleType) -> None:
    path = write(Path("m.pt"), g("userpkg.broken", "Net") + b")\x81")
    assert "--allow userpkg" in error(path)
    assert not Path("imported").exists()
    says = error(path, allow=["userpkg"])
    assert "importing userpkg.broken failed (ValueError: a b)" in says
    assert Path("imported").exists()


def test_allow_admits_module_classes_only(package: ModuleType) -> None:
    for name, says in [
        ("function", "a function, not a torch.nn.Module class"),
        ("Helper", "a class, but not a torch.nn.Module"),
        ("functools", "a module, not"),
        ("Gone", "has no such class"),
    ]:
        path = write(Path("m.pt"), g("userpkg.net", name) + b")R")
        assert says in error(path, allow=["userpkg"])
    path = write(Path("m.pt"), g("userpkg.net", "Mode") + s("fast") + b"\x85R}b")
    assert "Can only build" in error(path, allow=["userpkg"])
    for risky in ("builtins", "os", "functools", "torch.hub", "torch.fx", "torch"):
        body = {"builtins": g("builtins", "eval"), "os": g("os", "system")}.get(risky)
        body = body or g("torch.fx.graph_module", "GraphModule")
        assert "refused" in error(write(Path("m.pt"), body + CALL), allow=[risky])


def test_a_folder_that_poses_as_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("open('ran', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    path = write(tmp_path / "m.pt", g("timm.layers.norm", "Norm") + b")\x81")
    assert "hides the installed package" in error(path)
    assert not Path("ran").exists()
