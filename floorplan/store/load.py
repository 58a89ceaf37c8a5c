"""A model from what the user names: a file, or a factory in a module or a Python file.

model.pt          -> recognised by its bytes, then read without running code that it chooses
pkg.mod:factory   -> the user's own code: imported and called
path/file.py:name -> the same, from a file that need not be importable
…:name(classes=5) -> called with these arguments, literals alone
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from floorplan.errors import LoadError, describe
from floorplan.files import split_factory
from floorplan.store.admit import SCRIPT, check_allowed, import_path
from floorplan.store.recognize import REFUSED, SAFETENSORS, TAR, damaged_record, load_error, open_file, recognize
from floorplan.store.unpickle import read
from floorplan.store.weights import NESTED, copy_weights, is_state_dict
from floorplan.torch_doors import children_of, eager_of

_WRAPPERS = nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel
ADAPTED = "floorplan.adapted/1"
_FACTORY = "name a factory, as in: floorplan check pkg.mod:factory --weights FILE"


@dataclass(frozen=True)
class Loaded:
    """A module in the mode and with the requires_grad flags it was saved with."""

    module: nn.Module
    source: str
    notes: tuple[str, ...]


def load_model(
    spec: str, *, weights: str | None = None, allow: Sequence[str] = (), trust: bool = False, keep_head: bool = False
) -> Loaded:
    """Load `spec`, a file or a factory; LoadError, on one line, for all that goes wrong.

    `allow` names packages (or dotted parts of them) whose Module classes a file may use; a file
    runs code of its own choice only with `trust`. `weights` is copied over the module, strictly; with
    `keep_head` a layer that has another number of outputs in it keeps its own.
    """
    check_allowed(allow)
    factory = ":" in spec and not os.path.exists(spec)
    module, source, notes = (*_from_factory(spec), ()) if factory else _from_file(spec, allow, trust)
    module, opened = unwrapped(module, spec)
    notes += opened
    if weights is not None:
        notes += load_weights(module, weights, allow=allow, trust=trust, keep_head=keep_head)
        source += f", weights {weights}"
    return Loaded(module, source, notes)


def load_weights(
    module: nn.Module, path: str, *, allow: Sequence[str] = (), trust: bool = False, keep_head: bool = False
) -> tuple[str, ...]:
    """Copy a state_dict file into `module`; every key and shape must match. Returns notes."""
    found, notes = _read(path, allow, trust)
    found = _read_safetensors(path) if found is SAFETENSORS else found
    return notes + copy_weights(module, found, path, keep_head)


def _read(path: str, allow: Sequence[str], trust: bool) -> tuple[Any, tuple[str, ...]]:
    """The object in a file, SAFETENSORS for a file of that kind, and notes."""
    with open_file(path) as file:
        try:
            what = recognize(file, path)
        except OSError as e:
            raise load_error(path, f"cannot be read ({describe(e)})") from e
        if what.kind == REFUSED or (what.kind == TAR and not trust):
            raise load_error(path, what.why)
        if what.kind == SAFETENSORS:
            return SAFETENSORS, ()
        return read(file, what.kind, path, allow=allow, trust=trust)


def _read_safetensors(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path, device="cpu")
    except Exception as e:
        raise load_error(path, f"damaged safetensors file ({describe(e)})") from e


def _from_file(path: str, allow: Sequence[str], trust: bool) -> tuple[nn.Module, str, tuple[str, ...]]:
    found, notes = _read(path, allow, trust)
    if found is SAFETENSORS:
        raise load_error(path, f"safetensors hold weights only: {_FACTORY}")
    if isinstance(found, nn.Module):
        module, source = found, f"{path} ({type(found).__name__})"
    elif isinstance(found, Mapping):
        module, source, taken = _from_mapping(found, path, allow)
        notes += taken
    else:
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise load_error(path, f"holds {what}, not a model")
    if bad := damaged_record(path):  # a note, no refusal: torch can be told to write no checksums
        notes += (f"{bad} does not match its checksum: damaged, or saved without checksums",)
    return module, source, notes


def _from_mapping(found: Mapping[Any, Any], path: str, allow: Sequence[str]) -> tuple[nn.Module, str, tuple[str, ...]]:
    if isinstance(tag := found.get("format"), str) and tag == ADAPTED:
        return _load_artifact(path, allow), f"{path} (adapted model)", ()
    keys = [*NESTED, *(k for k in found if k not in NESTED)]
    for key in keys:
        if isinstance(module := found.get(key), nn.Module):
            source = f"{path} ({type(module).__name__})"
            return module, source, (f"took the model under the key {key!r} of a dict",)
    if is_state_dict(found):
        raise load_error(path, f"holds a state_dict ({len(found)} tensors), no model: {_FACTORY}")
    if (inner := next((k for k in keys if is_state_dict(found.get(k))), None)) is not None:
        raise load_error(path, f"a checkpoint with a state_dict under {inner!r}: {_FACTORY}")
    names = ", ".join(k if isinstance(k, str) else type(k).__name__ for k in list(found)[:4])
    raise load_error(path, f"holds a dict without a model in it (keys: {names or 'none'})")


def _load_artifact(path: str, allow: Sequence[str]) -> nn.Module:
    from floorplan.store.artifact import load_artifact

    try:
        return load_artifact(path, map_location="cpu", allow=allow)
    except LoadError:
        raise
    except Exception as e:
        raise load_error(path, f"damaged adapted model ({describe(e)})") from e


def unwrapped(module: nn.Module, spec: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The module inside what parallel, compiling and averaging wrappers put around it, and notes."""
    notes: list[str] = []
    while True:
        if isinstance(module, _WRAPPERS):
            inner = children_of(module).get("module")
            if not isinstance(inner, nn.Module) or len(notes) > 3:
                raise load_error(spec, f"a {type(module).__name__} around nothing: damaged")
            notes.append(f"unwrapped {type(module).__name__}: analysing the module inside")
            module = inner
        elif type(module).__name__ == "OptimizedModule":
            notes.append("unwrapped the compiled module: analysing the eager one")
            module = eager_of(module)
        else:
            break
    if isinstance(module, torch.jit.ScriptModule):
        raise load_error(spec, "a TorchScript module, which cannot be analysed; name the eager one")
    return module, tuple(notes)


def _arguments(text: str, spec: str) -> tuple[list[Any], dict[str, Any]]:
    """The literals of "(5, classes=10)"; nothing is evaluated but them."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body if text else None
        if call is None:
            return [], {}
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("one pair of brackets")
        named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        if len(named) < len(call.keywords):
            raise ValueError("** is no literal")
        return [ast.literal_eval(a) for a in call.args], named
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as e:
        way = "write numbers, strings, None, True, False, and lists, tuples or dicts of them"
        raise load_error(spec, f"its arguments are not literals ({describe(e, 80)}); {way}") from e


def _from_factory(spec: str) -> tuple[nn.Module, str]:
    where, name, given = split_factory(spec)
    if "/" in name or "\\" in name:  # the colon stood in a folder's name or after a drive
        raise load_error(spec, "no such file; a factory is named pkg.mod:factory")
    if not where or not name:
        raise load_error(spec, "not a file; a factory is named pkg.mod:factory or FILE.py:factory")
    args, kwargs = _arguments(given, spec)
    is_file = where.endswith(".py") or "/" in where or "\\" in where
    with import_path(str(Path(where).parent) if is_file else "."):
        home = _import_source(where, spec) if is_file else _import_module(where, spec)
        try:
            target = functools.reduce(getattr, name.split("."), home)
        except Exception as e:
            raise load_error(spec, f"{where} has no {name!r}{_near(home)}") from e
        return _build(target, spec, args, kwargs)


def _near(home: Any) -> str:
    public = {n: v for n, v in vars(home).items() if callable(v) and not n.startswith("_")}
    own = [n for n, v in public.items() if getattr(v, "__module__", "") == home.__name__]
    return f" (it has {', '.join(own[:5])})" if own else ""


def _build(target: Any, spec: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[nn.Module, str]:
    if isinstance(target, nn.Module) and not args and not kwargs:
        return target, f"{spec} ({type(target).__name__})"
    if not callable(target) or isinstance(target, nn.Module):
        raise load_error(spec, f"a {type(target).__name__}, neither callable nor a torch.nn.Module")
    if why := _unfit(target, args, kwargs):
        raise load_error(spec, why)
    try:
        module = target(*args, **kwargs)
    except (Exception, SystemExit) as e:
        raise load_error(spec, f"raised {describe(e)}") from e
    if not isinstance(module, nn.Module):
        raise load_error(spec, f"returned a {type(module).__name__}, not a torch.nn.Module")
    return module, f"{spec} ({type(module).__name__})"


def _unfit(target: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    """Why a factory cannot be called so; "" if it can, as far as its signature tells."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return ""  # some built-ins have no signature: calling them will tell
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in optional]
        if args or kwargs:
            return f"cannot be called with these arguments ({e})"
        way = f"name a function without, or give literals: {getattr(target, '__name__', 'name')}({needed[0]}=…)"
        return f"needs arguments ({', '.join(needed)}); {way}"
    return ""


def _import_module(name: str, spec: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise load_error(spec, f"no such file, and {name!r} is not the name of a module")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        raise load_error(spec, f"cannot import {name} ({describe(e)})") from e


def _import_source(path: str, spec: str) -> Any:
    open_file(path).close()
    name = f"{SCRIPT}{Path(path).stem}"
    source = importlib.util.spec_from_file_location(name, path)
    if source is None or source.loader is None:
        raise load_error(spec, f"{path} is not Python source (.py)")
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module  # dataclasses and pickle look classes up by it
    try:
        source.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise load_error(spec, f"cannot import {path} ({describe(e)})") from e
    return module
