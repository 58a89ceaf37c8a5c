"""Tell what a file is from its bytes, before anything in it is interpreted.

zip   */data.pkl -> torch.save, unless code/ or constants.pkl (TorchScript), archive_format (.pt2)
pickle with torch's magic number -> torch.save, legacy layout
8-byte length + '{"' -> safetensors;  protobuf with a graph -> ONNX;  everything else by its magic
"""

import codecs
import struct
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from floorplan.errors import LoadError, describe, one_line

ZIP, LEGACY, TAR, SAFETENSORS, REFUSED = "zip", "legacy", "tar", "safetensors", "refused"

EAGER = "save the eager model with torch.save(model), or name a factory pkg.mod:factory"
ONNX = "name the PyTorch model it came from, a torch.save(model) file or a factory pkg.mod:factory"
TORCH_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_MAGICS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes"),
    (b"\x93NUMPY", "a NumPy .npy array"),
    (b"\x1f\x8b", "gzip-compressed data: unpack it first"),
    (b"BZh", "bzip2-compressed data: unpack it first"),
    (b"\xfd7zXZ\x00", "xz-compressed data: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data: unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
    (b"GGUF", "a GGUF language model"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF", "a PDF document"),
    (b"RIFF", "a RIFF file (audio, video or WebP)"),
    (b"\x7fELF", "an ELF program or library"),
    (b"MZ", "a Windows program or library"),
    (b"version https://git-lfs", "a Git LFS pointer: run git lfs pull"),
)
# ModelProto, onnx.proto: field number -> wire type (0 varint, 2 length-delimited)
_ONNX_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}


@dataclass(frozen=True)
class Recognized:
    """One of the kinds above, and for what cannot be loaded the reason and the way out."""

    kind: str
    why: str = ""


def _refused(why: str) -> Recognized:
    return Recognized(REFUSED, why)


def _unknown(looks: str) -> Recognized:
    return _refused(f"not a torch model file (looks like {looks})")


def load_error(where: object, what: str) -> LoadError:
    """The one-line LoadError `where: what`; both may come from a hostile file."""
    return LoadError(one_line(f"{one_line(where, 200)}: {what}", 900))


def open_file(path: str) -> BinaryIO:
    """Open a regular file for reading; LoadError for what is missing, a folder or a device."""
    try:
        target = Path(path)
        if target.is_dir():
            raise load_error(path, "is a folder; name the model file in it")
        if not target.exists():
            raise load_error(path, "no such file; a factory is named pkg.mod:factory")
        if not target.is_file():
            raise load_error(path, "not a regular file")
        return target.open("rb")
    except (OSError, ValueError) as e:
        raise load_error(path, f"cannot be read ({describe(e)})") from e


def recognize(file: BinaryIO, name: str) -> Recognized:
    """Kind of an open file (left at its start); `name` only breaks ties by its suffix."""
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(512)
    try:
        return _recognize(file, name.lower(), head, size)
    finally:
        file.seek(0)


def _recognize(file: BinaryIO, name: str, head: bytes, size: int) -> Recognized:
    if not head:
        return _refused("the file is empty")
    if head.startswith(b"PK"):
        return _zip(file)
    if head[:1] == b"\x80" and TORCH_MAGIC in head[:32]:
        return Recognized(LEGACY)
    if size < 15 and (b"\x80\x02" + TORCH_MAGIC).startswith(head):
        return _refused(f"truncated: {size} bytes of a torch.save file")
    if _is_tar(head):
        return _tar(file)
    return _weights(head, size) or _onnx(file, size) or _foreign(head, name)


def _foreign(head: bytes, name: str) -> Recognized:
    """The refusal of all other data, by its magic, then its suffix, then whether it is text."""
    if looks := next((what for magic, what in _MAGICS if head.startswith(magic)), ""):
        return _unknown(looks)
    if head[4:8] == b"TFL3":
        return _unknown("a TensorFlow Lite model")
    if head[:1] == b"\x80" and len(head) > 1 and head[1] in range(2, 6):
        return _unknown("a plain pickle: nothing in it was run")
    if name.endswith(".py"):
        return _refused("Python source; name the factory in it: FILE.py:factory")
    if head.lstrip()[:1] == b"<":
        return _unknown("an HTML or XML page, perhaps of a failed download")
    if name.endswith(".onnx"):
        return _refused(f"damaged ONNX model: {ONNX}")
    return _unknown("text" if _is_text(head) else "unknown data")


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end inside a character
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\t\r\n\f" for c in text)


def _zip(file: BinaryIO) -> Recognized:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except Exception as e:
        return _refused(f"truncated or damaged zip archive ({describe(e, 100)}); copy or download it again")
    tails = {n.partition("/")[2] for n in names} | set(names)
    if any(t.startswith("code/") for t in tails) or tails & {"constants.pkl", "model.json"}:
        return _refused(f"TorchScript archive: {EAGER}")
    exported = {"archive_format", "serialized_exported_program.json"}
    if tails & exported or any(t.startswith("models/") and t.endswith(".json") for t in tails):
        return _refused(f"exported program (.pt2), whose own loader may run code and is not called: {EAGER}")
    if any(t.startswith(".data/extern_modules") for t in tails):
        return _refused(f"torch.package archive, which is code to run: {EAGER}")
    if "data.pkl" in tails:
        return Recognized(ZIP)
    if any(t.endswith(".weights.h5") for t in tails):
        return _unknown("a Keras model")
    arrays = names and all(n.endswith(".npy") for n in names)
    return _unknown("NumPy .npz arrays" if arrays else "a zip archive without data.pkl")


def damaged_record(file: BinaryIO | Path | str) -> str:
    """The first record of a zip that does not match its checksum; "" for none, or for no zip."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() or ""
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return ""


def _is_tar(head: bytes) -> bool:
    try:
        return head[257:262] == b"ustar" or bool(tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape"))
    except (tarfile.HeaderError, ValueError):
        return False


def _tar(file: BinaryIO) -> Recognized:
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            names = [member.name for member in archive]
    except Exception as e:
        return _refused(f"truncated or damaged tar archive ({describe(e, 100)})")
    parts = {part for n in names for part in Path(n).parts}
    if parts & {"code", "constants.pkl", "model.json"}:
        return _refused(f"TorchScript archive: {EAGER}")
    if {"pickle", "storages", "tensors"} <= set(names):
        why = "torch.save file of torch 0.1 (tar), which has no safe reader: load it in torch and"
        return Recognized(TAR, f"{why} save it again, or pass --trust")
    return _unknown("a tar archive: unpack it first")


def _weights(head: bytes, size: int) -> Recognized | None:
    if len(head) < 10 or head[8:10] not in (b'{"', b"{}"):
        return None
    (length,) = struct.unpack("<Q", head[:8])
    return Recognized(SAFETENSORS) if length <= size - 8 else _refused(f"truncated safetensors file ({size} bytes)")


def _onnx(file: BinaryIO, size: int) -> Recognized | None:
    """ONNX has no magic: walk the protobuf's top level and ask for an IR version and a graph."""
    seen: set[int] = set()
    whole = True
    file.seek(0)
    while whole and file.tell() < size:
        tag = _varint(file)
        value = _varint(file) if tag is not None and _ONNX_FIELDS.get(tag >> 3) == tag & 7 else None
        if tag is None or value is None or (tag >> 3 == 1 and not 1 <= value <= 100):
            whole = False
        else:
            seen.add(tag >> 3)
            whole = tag & 7 != 2 or file.seek(value, 1) <= size
    if not {1, 7} <= seen:
        return None
    return _refused(f"{'ONNX model' if whole else 'damaged ONNX model'}: {ONNX}")


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
