"""Hostile and odd model files: nothing they choose runs, and the refusal names what they named."""

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from floorplan.errors import LoadError
from floorplan.store.load import load_model

MAGIC = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001}]


def g(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def s(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def write(path: Path, body: bytes, layout: str) -> str:
    """A file whose main pickle is `body`, as a zip or in the legacy layout."""
    code = b"\x80\x02" + body + b"."
    if layout == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("m/data.pkl", code)
            archive.writestr("m/version", "3\n")
            archive.writestr("m/byteorder", "little")
    else:
        head = b"".join(pickle.dumps(v, 2) for v in MAGIC)
        path.write_bytes(head + code + pickle.dumps([], 2))
    return str(path)


@pytest.fixture(params=["zip", "legacy"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def error(spec: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CALL = b"(" + s("MARKER") + b"tR"
LINEAR = g("torch.nn.modules.linear", "Linear")
IDENTITY = g("torch.nn.modules.linear", "Identity")
SEQUENTIAL = g("torch.nn.modules.container", "Sequential")
META = g("torch._utils", "_rebuild_meta_tensor_no_storage") + b"(" + g("torch", "float32")
META += b"K\x02\x85K\x01\x85\x89tR"
TRAINING = s("training") + b"\x88"
EMPTY_MODULE = b")\x81}(" + b"".join(
    s(k) + v for k, v in {"training": b"\x88", "_parameters": b"}", "_buffers": b"}", "_modules": b"}"}.items()
)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (g("os", "mkdir") + CALL, "refused os.mkdir: not a layer"),
        (g("posix", "mkdir") + CALL, "refused posix.mkdir: not a layer"),
        (g("builtins", "eval") + CALL, "refused builtins.eval: not a layer"),
        (g("__builtin__", "eval") + CALL, "refused builtins.eval: not a layer"),
        (g("torch.hub", "load") + CALL, "refused torch.hub.load: not a layer"),
        (g("torch", "load") + CALL, "refused torch.load: not a layer"),
        (g("torch.storage", "_load_from_bytes") + CALL, "refused torch.storage._load_from_bytes"),
        (g("torch.nn.modules.module", "register_module_forward_hook") + CALL, "a function, not a"),
        (g("torch.nn.modules.module", "os") + CALL, "the installed torch.nn.modules.module has no"),
        (g("torch.nn.modules.module", "torch") + CALL, "a module, not a torch.nn.Module class"),
        (g("torch.nn.modules.container", "OrderedDict") + CALL, "it is collections.OrderedDict"),
        (g("torch.nn", "Module.__init__.__globals__") + CALL, "refused torch.nn.Module.__init__"),
        (g("torch.nn.modules", "module.os.system") + CALL, "importing torch.nn.modules.module.os"),
        (g("functools", "partial") + b"(" + g("os", "system") + b"tR", "a partial can call any"),
        (g("torch.fx.graph_module", "reduce_graph_module") + CALL, "running source text in the"),
        (g("torch.jit._script", "RecursiveScriptModule") + CALL, "it holds TorchScript"),
        (g("torch.jit", "ScriptFunction") + CALL, "it holds TorchScript"),
        (g("__main__", "Net") + b")\x81", "refused __main__.Net: the script that saved it"),
        (
            g("mypkg.net", "Net") + b")\x81",
            "refused mypkg.net.Net: mypkg is not on the allow-list; --allow mypkg imports it",
        ),
        (g("torch.nn.modules.conv", "Conv9d") + b")\x81", "has no such class"),
        (g("torch.nn.modules.nowhere", "Net") + b")\x81", "importing torch.nn.modules.no"),
        (g("torch.nn.modules bad", "Net") + b")\x81", "not the name of a class"),
        (b"(imath\nsqrt\n", "another pickle protocol"),
        (b"\x80\x04" + s("os") + s("mkdir") + b"\x93", "another pickle protocol"),
        (LINEAR + CALL, "the file calls Linear"),
        (LINEAR + b"K\x05K\x05\x86\x81", "Linear is not made empty"),
        (LINEAR + b")\x81", "its Linear is incomplete"),
        (LINEAR, "holds the class Linear, not a model"),
        (LINEAR + b"}" + s("x") + b"K\x01sb", "Can only build"),
        (g("torch.nn.functional", "relu") + CALL, "the file calls relu"),
        (g("torch._utils", "_rebuild_parameter") + b"(" + LINEAR + b"\x88Nt" + b"R", "not safe to"),
        (IDENTITY + EMPTY_MODULE + s("forward") + LINEAR + b"ub", "replaces its method forward"),
        (
            IDENTITY + EMPTY_MODULE + s("_forward_hooks") + b"}K\x00" + LINEAR + b"s" + b"ub",
            "its Identity has _forward_hooks, which would run",
        ),
        (
            IDENTITY + EMPTY_MODULE + s("_compiled_call_impl") + LINEAR + b"ub",
            "replaces its method _compiled_call_impl",
        ),
        (
            g("torch._utils", "_rebuild_parameter")
            + b"("
            + META
            + b"\x88}K\x00"
            + IDENTITY
            + EMPTY_MODULE
            + b"ub"
            + b"stR",
            "a tensor in it holds backward hooks",
        ),
        (g("torch.nn.parallel.data_parallel", "DataParallel") + EMPTY_MODULE + b"ub", "a DataParallel around nothing"),
        (
            g("torch.nn.parallel.data_parallel", "DataParallel")
            + b")\x81q\x01}("
            + TRAINING
            + s("_parameters")
            + b"}"
            + s("_buffers")
            + b"}"
            + s("_modules")
            + b"}"
            + s("module")
            + b"h\x01sub",
            "a DataParallel around nothing",
        ),
        (SEQUENTIAL + EMPTY_MODULE + s("_modules") + b"}" + s("0") + LINEAR + b"sub", "has _modules of the wrong kind"),
    ],
)
def test_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, body: bytes, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(torch.nn.modules.module._global_forward_hooks)
    assert says in error(write(tmp_path / "m.pt", body, layout))
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]
    assert torch.nn.modules.module._global_forward_hooks == before


class Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new", [True, False])
def test_a_payload_beside_real_weights(tmp_path: Path, new: bool) -> None:
    path, marker = tmp_path / "m.pt", tmp_path / "ran"
    found = {"state_dict": nn.Conv2d(1, 1, 1).state_dict(), "meta": Payload(str(marker))}
    torch.save(found, path, _use_new_zipfile_serialization=new)
    assert "mkdir" in error(str(path))
    with pytest.raises(LoadError, match="mkdir"):
        load_model("torch.nn:Identity", weights=str(path))
    assert not marker.exists()
    assert "a checkpoint with a state_dict under 'state_dict'" in error(str(path), trust=True)
    assert marker.exists(), "the payload does run where the user says so"


def test_pickled_graph_modules_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), path)
    assert "running source text in the file" in error(str(path))
    assert type(load_model(str(path), trust=True).module).__name__ == "GraphModule"


def test_hooks_and_parametrizations(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(nn.utils.spectral_norm(nn.Linear(2, 2)), path)
    assert "refused torch.nn.utils.spectral_norm.SpectralNorm" in error(str(path))
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        torch.save(net, path)
    hooked = nn.Sequential(nn.ReLU(), nn.ReLU())
    hooked.register_forward_hook(hooked[0])
    torch.save(hooked, path)
    assert "its Sequential has _forward_hooks" in error(str(path))


def test_nothing_stays_admitted(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    before = set(torch.serialization.get_safe_globals())
    torch.save(nn.Linear(2, 2), path)
    load_model(str(path))
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_a_pickle_too_large_to_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.pt"
    torch.save(nn.Linear(2, 2), path)
    monkeypatch.setattr("floorplan.store.unpickle._PICKLE_LIMIT", 100)
    assert "data.pkl unpacks to" in error(str(path))


@pytest.mark.parametrize("layers", [3, 2000])
def test_deep_and_cyclic_data_end_in_one_line(tmp_path: Path, layout: str, layers: int) -> None:
    assert "holds a tuple" in error(write(tmp_path / "a.pt", b")" + b"\x85" * 3, layout))
    body = b")" + b"\x85" * layers if layers > 3 else b"]q\x00h\x00a"
    error(write(tmp_path / "m.pt", body, layout))


def test_modules_with_sharing_state_and_buffers_survive(tmp_path: Path) -> None:
    class_free = nn.Sequential(nn.LSTM(3, 4, 2), nn.SyncBatchNorm(4), nn.Upsample(scale_factor=2))
    class_free.extra = nn.Buffer(torch.ones(2))
    class_free.tied = class_free[0]
    for new in (True, False):
        torch.save(class_free, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
        net: Any = load_model(str(tmp_path / "m.pt")).module
        assert net.tied is net[0]
        assert list(net.state_dict()) == list(class_free.state_dict())
        x = torch.ones(5, 1, 3)
        assert torch.equal(net[0](x)[0], class_free[0](x)[0])


def test_crafted_files_can_load(tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / "m.pt", IDENTITY + EMPTY_MODULE + b"ub", layout)
    assert type(load_model(path).module) is nn.Identity
