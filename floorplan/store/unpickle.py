"""Read a torch.save file without running code that it chooses.

names in the pickle -> each on our list, or a Module class of an admitted package, or inert; harmful ones refused
admitted class -> a stand-in that the unpickler may make empty and fill, but never call
loaded modules  -> stand-ins swapped for the classes; hooks, replaced methods and what is inert refused
"""

import enum
import io
import pickletools
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import nn

from floorplan.errors import LoadError, describe
from floorplan.store.admit import admit, import_path, is_module_class, is_plain, modern
from floorplan.store.inert import Inert, Nothing, filled_with_items, is_harmful
from floorplan.store.legacy import without_module_records
from floorplan.store.recognize import LEGACY, load_error
from floorplan.torch_doors import COMPILED_CALL, STORES, has_gradient_hook

_OPCODES_LEFT_OUT = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"}
_PICKLE_LIMIT = 1 << 28


class _StandIn:
    """An admitted class, function or enum inside the unpickler, which may not call it freely."""

    def __init__(self, target: Any) -> None:
        self.target = target
        # The unpickler makes objects by cls.__new__(cls, *args): this is found before object's.
        self.__dict__["__new__"] = self._make

    def _make(self, _cls: object, *args: object) -> Any:
        if args or not is_module_class(self.target):
            raise UnpicklingError(f"{self.target.__name__} is not made empty")
        return self.target.__new__(self.target)

    def __call__(self, *args: Any) -> Any:
        if isinstance(self.target, enum.EnumMeta) and len(args) == 1:
            return self.target(*args)
        raise UnpicklingError(f"the file calls {getattr(self.target, '__name__', self.target)}")


def read(file: BinaryIO, kind: str, name: str, *, allow: Sequence[str], trust: bool) -> tuple[Any, tuple[str, ...]]:
    """The object in an open torch.save file, on the CPU, and notes; LoadError for anything unsafe or damaged.

    `trust` reads it with the ordinary pickle, which runs whatever code the file holds.
    """
    try:
        if trust:
            with import_path("."):
                return _torch_load(file, weights_only=False), ()
        admitted, unread = {}, {}
        for n in _foreign_names(file, kind, name):
            try:
                admitted[n] = admit(n, name, allow)
            except LoadError as e:
                unread[n] = e
                if is_harmful(n):
                    raise next(iter(unread.values())) from e
        filled = {n: f for p in _pickles(file, kind) for n, f in filled_with_items(p).items()} if unread else {}
        source = without_module_records(file) if kind == LEGACY else file
        pairs: list[Any] = [(_StandIn(target), n) for n, target in admitted.items()]
        inert = [Inert(why, filled.get(n)) for n, why in unread.items()]
        pairs += zip(inert, unread, strict=True)
        # Filling an object asks for its real class; no pickle can name a path with a newline.
        pairs += [(t, "\n" + n) for n, t in admitted.items() if is_module_class(t)] + [(Nothing, "\nNothing")]
        try:
            with torch.serialization.safe_globals(pairs):
                found = _torch_load(source, weights_only=True)
        except Exception as e:
            raise next(iter(unread.values()), e) from e
        refusals = {id(made): i.refusal for i in inert for made in (i, *i.made)}
        if id(found) in refusals:
            raise refusals[id(found)]
        notes = (f"left unread what is neither a tensor nor a layer: {', '.join(unread)}",) if unread else ()
        return _audited(found, name, refusals), notes
    except LoadError:
        raise
    except (Exception, SystemExit) as e:
        what = "cannot be loaded" if trust else "truncated or damaged, or not safe to load"
        raise load_error(name, f"{what} ({describe(_short(e))})") from e


def _short(error: BaseException) -> BaseException:
    """Torch's two-option advice dropped: only what its unpickler found."""
    found = str(error).partition("WeightsUnpickler error:")[2]
    return UnpicklingError(found.partition("Please use")[0]) if found else error


def _torch_load(file: BinaryIO, *, weights_only: bool) -> Any:
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=False)


def _pickles(file: BinaryIO, kind: str) -> Iterator[BinaryIO]:
    """The pickles in a torch.save file; a legacy file is five, one after the other."""
    file.seek(0)
    if kind == LEGACY:
        yield from (file for _ in range(5))
        return
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.filename.endswith("data.pkl"):
                if info.file_size > _PICKLE_LIMIT:
                    raise UnpicklingError(f"{info.filename} unpacks to {info.file_size} bytes")
                yield io.BytesIO(archive.read(info))


def _foreign_names(file: BinaryIO, kind: str, name: str) -> list[str]:
    """Every global the file names, in order, that is not plain data of torch."""
    found: dict[str, None] = {}
    for pickled in _pickles(file, kind):
        for op, arg, _ in pickletools.genops(pickled):
            if op.name in _OPCODES_LEFT_OUT or (op.name == "PROTO" and arg != 2):
                what = "written with another pickle protocol than torch.save's default"
                raise load_error(name, f"{what} ({op.name} {arg}); save it again without one")
            if op.name == "GLOBAL":
                found[modern(str(arg))] = None
    return [n for n in found if not is_plain(n)]


def _audited(found: Any, name: str, refusals: dict[int, LoadError]) -> Any:
    """`found` with classes in place of stand-ins, once every module in it is plain data.

    refusals: by the id of each inert object, which may stand beside modules, not in them.
    """
    seen: set[int] = set()

    def clean(value: Any, inside: bool) -> Any:
        if isinstance(value, _StandIn):
            return value.target
        if inside and id(value) in refusals:
            raise refusals[id(value)]
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(clean(v, inside) for v in value)
        if id(value) in seen:
            return value
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if has_gradient_hook(value):
                raise load_error(name, "a tensor in it holds backward hooks; save without them")
        elif isinstance(value, dict):
            value.update({k: clean(v, inside) for k, v in value.items()})
        elif isinstance(value, list):
            value[:] = [clean(v, inside) for v in value]
        elif isinstance(value, nn.Module):
            clean(vars(value), True)
            if why := _why_not_plain(value):
                raise load_error(name, f"its {type(value).__name__} {why}")
        return value

    return clean(found, False)


def _why_not_plain(module: nn.Module) -> str:
    held = vars(module)
    for slot, kind in STORES.items():
        values = held.get(slot)
        if not isinstance(values, dict) or not isinstance(held.get("training"), bool):
            return "is incomplete: the file is damaged"
        if not all(isinstance(k, str) and isinstance(v, kind | None) for k, v in values.items()):
            return f"has {slot} of the wrong kind: the file is damaged"
    for key, value in held.items():
        if "_hooks" in key and value:
            return f"has {key}, which would run on every call; remove them and save again"
        hidden = getattr(type(module), key, None) if isinstance(key, str) else None
        if callable(hidden) or (key == COMPILED_CALL and value):
            return f"replaces its method {key}; save the state_dict and name a factory"
    return ""
