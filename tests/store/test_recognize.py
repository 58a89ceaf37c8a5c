"""Every kind of file is told by its bytes, and the refusal says what to do."""

import gzip
import io
import os
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from floorplan.errors import LoadError, one_line
from floorplan.store.recognize import (
    LEGACY,
    REFUSED,
    SAFETENSORS,
    TAR,
    ZIP,
    Recognized,
    load_error,
    open_file,
    recognize,
)


def told(data: bytes, name: str = "model.pt") -> Recognized:
    return recognize(io.BytesIO(data), name)


def saved(obj: object, *, new: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer, _use_new_zipfile_serialization=new)
    return buffer.getvalue()


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return buffer.getvalue()


def tarred(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


ONNX = b"\x08\x0a" + field(2, b"pytorch") + field(7, b"\x12\x01g") + field(8, b"\x10\x14")


def test_torch_save_in_both_layouts() -> None:
    net = nn.Conv2d(1, 1, 1)
    assert told(saved(net)).kind == ZIP
    assert told(saved(net, new=False)).kind == LEGACY
    assert told(saved(net.state_dict(), new=False)).kind == LEGACY


def test_the_file_is_left_at_its_start() -> None:
    file = io.BytesIO(ONNX)
    recognize(file, "x")
    assert file.tell() == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchscript_is_named() -> None:
    buffer = io.BytesIO()
    jit: Any = torch.jit
    jit.save(jit.trace(nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)), buffer)
    assert told(buffer.getvalue()).why.startswith("TorchScript archive: save the eager model")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (zipped("m/data.pkl", "m/code/__torch__.py"), "TorchScript archive"),
        (zipped("m/model.json", "m/tensors/0"), "TorchScript archive"),
        (tarred("m/code/a.py", "m/constants.pkl"), "TorchScript archive"),
        (zipped("m/archive_format", "m/models/model.json"), "exported program (.pt2)"),
        (zipped("serialized_exported_program.json"), "exported program (.pt2)"),
        (zipped("m/data.pkl", "m/models/model.json"), "exported program (.pt2)"),
        (zipped("m/.data/extern_modules", "m/data.pkl"), "torch.package archive"),
        (zipped("a.npy", "b.npy"), "looks like NumPy .npz arrays"),
        (zipped("config.json", "model.weights.h5"), "looks like a Keras model"),
        (zipped("readme.txt"), "a zip archive without data.pkl"),
        (zipped(), "a zip archive without data.pkl"),
        (zipped("m/data.pkl")[:-10], "truncated or damaged zip archive"),
        (b"PK\x03\x04", "truncated or damaged zip archive"),
        (tarred("a.txt"), "looks like a tar archive"),
        (saved([1], new=False)[:9], "truncated: 9 bytes"),
        (ONNX, "ONNX model: name the PyTorch model"),
        (ONNX[:-3], "damaged ONNX model"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file"),
        (b"\x93NUMPY\x01\x00", "a NumPy .npy array"),
        (b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.", "a plain pickle"),
        (gzip.compress(b"x", mtime=0), "gzip-compressed data: unpack it first"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF language model"),
        (b"\x1c\x00\x00\x00TFL3", "a TensorFlow Lite model"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer: run git lfs pull"),
        (b"<!DOCTYPE html><html>", "an HTML or XML page"),
        ("größe = 3\n".encode() * 90, "looks like text"),
        (bytes(range(1, 256)) * 4, "looks like unknown data"),
        (bytes(2000), "looks like unknown data"),
        (struct.pack("<Q", 9000) + b'{"a":', "truncated safetensors file"),
    ],
)
def test_refused_with_a_reason(data: bytes, says: str) -> None:
    what = told(data)
    assert what.kind == REFUSED
    assert says in what.why
    assert "\n" not in what.why


def test_names_break_ties() -> None:
    assert "ONNX" in told(b"\x01\x02\xff\x00", "net.ONNX").why
    assert "Git LFS" in told(b"version https://git-lfs.github.com/spec/v1\n", "net.onnx").why
    assert "FILE.py:factory" in told(b"import torch\n", "net.py").why


def test_safetensors_and_old_tar() -> None:
    assert told(struct.pack("<Q", 2) + b"{}").kind == SAFETENSORS
    old = told(tarred("pickle", "storages", "tensors"))
    assert old.kind == TAR and "--trust" in old.why


def test_a_real_onnx_file() -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    io_info = [helper.make_tensor_value_info(n, 1, [1]) for n in "xy"]
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "g", io_info[:1], io_info[1:])
    data = helper.make_model(graph, producer_name="p" * 300).SerializeToString()
    assert told(data).why.startswith("ONNX model: ")


def test_no_prefix_of_anything_escapes() -> None:
    for data in (ONNX, tarred("pickle"), zipped("m/data.pkl"), saved([1], new=False)):
        for end in range(0, min(len(data), 600), 7):
            assert told(data[:end]).kind in (REFUSED, LEGACY, TAR)


def test_open_file_refuses_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in [
        (tmp_path / "no.pt", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("x" * 5000), "cannot be read"),
        (Path("a\0b"), "no such file"),
    ]:
        with pytest.raises(LoadError, match=says) as caught:
            open_file(str(path))
        assert "\n" not in str(caught.value)


def test_messages_stay_on_one_short_printable_line() -> None:
    assert one_line("a\n b\x1b[31m\tc") == "a b?[31m c"
    assert len(one_line("x" * 1000)) == 240
    assert str(load_error("a\nb", "c\nd")) == "a b: c d"
