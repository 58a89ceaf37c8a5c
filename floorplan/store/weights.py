"""Copy a state_dict into a module: every key, every shape, nothing skipped in silence.

{"state_dict": {"module.conv.weight": t}}  ->  conv.weight    both steps are said aloud
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from floorplan.errors import LoadError, describe
from floorplan.store.recognize import load_error

# Where training scripts put a model or its state_dict inside a checkpoint, likeliest first.
NESTED = ("state_dict", "model", "model_state_dict", "net")
_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 3

_State = dict[str, torch.Tensor]


def is_state_dict(found: object) -> bool:
    """Whether `found` is a mapping from names to tensors, and not empty."""
    items = found.items() if isinstance(found, Mapping) else ()
    return bool(items) and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in items)


def copy_weights(module: nn.Module, found: object, path: str) -> tuple[str, ...]:
    """Copy what was read from `path` into `module`; LoadError unless all of it fits."""
    try:
        given, notes = _state_dict_in(found, path)
        expected = module.state_dict()
        given = _strip(given, expected, path, notes)
        _compare(given, expected, path, notes)
        module.load_state_dict(given, strict=True)
    except LoadError:
        raise
    except Exception as e:
        raise load_error(path, f"does not fit the model ({describe(e)})") from e
    return tuple(notes)


def _state_dict_in(found: object, path: str) -> tuple[_State, list[str]]:
    notes: list[str] = []
    if isinstance(found, Mapping) and not is_state_dict(found):
        if (key := next((k for k in NESTED if isinstance(found.get(k), Mapping | nn.Module)), None)) is not None:
            notes.append(f"took the weights under the key {key!r}")
            found = found[key]
    if isinstance(found, nn.Module):
        notes.append(f"took the weights of the {type(found).__name__} saved in the file")
        found = found.state_dict()
    if not isinstance(found, Mapping):
        raise load_error(path, f"holds a {type(found).__name__}, not a state_dict")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            what = f"{key!r} is a {type(value).__name__}, not a tensor"
            raise load_error(path, f"holds a dict, but not a state_dict ({what})")
    if not found:
        raise load_error(path, "holds an empty state_dict")
    return dict(found), notes


def _strip(given: _State, expected: Mapping[str, Any], path: str, notes: list[str]) -> _State:
    """Drop the prefixes that wrappers put before every key, where the model has none such."""
    while shared := next((p for p in _PREFIXES if all(k.startswith(p) for k in given)), ""):
        if expected and all(k.startswith(shared) for k in expected):
            break
        given = {k.removeprefix(shared): v for k, v in given.items()}
        notes.append(f"stripped the {shared!r} prefix of {len(given)} keys")
    inner = [k for k in given if "_orig_mod." in k]
    if inner and not any("_orig_mod." in k for k in expected):
        plain = {k.replace("_orig_mod.", ""): v for k, v in given.items()}
        if len(plain) < len(given):
            raise load_error(path, "has keys both with and without '_orig_mod.'")
        given = plain
        notes.append(f"stripped '_orig_mod.' inside {len(inner)} keys")
    return given


def _compare(given: _State, expected: Mapping[str, Any], path: str, notes: list[str]) -> None:
    missing = [k for k in expected if k not in given]
    unexpected = [k for k in given if k not in expected]
    both = [k for k in given if k in expected and isinstance(expected[k], torch.Tensor)]
    counters = [k for k in missing if k.rpartition(".")[2] == "num_batches_tracked"]
    if counters and not any(k.rpartition(".")[2] == "num_batches_tracked" for k in given):
        # Files older than these counters, which torch itself fills in.
        missing = [k for k in missing if k not in counters]
        notes.append(f"the file has no num_batches_tracked: {len(counters)} keep their value")
    sizes = {k: (given[k].shape, expected[k].shape) for k in both}
    shapes = [f"{k} {list(has)} for {list(wants)}" for k, (has, wants) in sizes.items() if has != wants]
    kinds = [k for k in both if _kind(given[k]) != _kind(expected[k])]
    said = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    said["of another kind of number"] = kinds
    if parts := [_few(keys, what) for what, keys in said.items() if keys]:
        raise load_error(path, "does not fit the model: " + "; ".join(parts))
    if any(expected[k].is_meta for k in both):
        raise load_error(path, "the model is on the meta device, where weights cannot be copied")
    cast = [k for k in both if given[k].dtype != expected[k].dtype]
    if cast:
        pair = f"{given[cast[0]].dtype} to {expected[cast[0]].dtype}".replace("torch.", "")
        notes.append(f"cast {len(cast)} tensors to the model's precision ({pair})")


def _kind(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized


def _few(keys: list[str], what: str) -> str:
    """`3 keys missing (a, b, …)`"""
    more = ", …" if len(keys) > _SHOWN else ""
    plural = "" if len(keys) == 1 else "s"
    return f"{len(keys)} key{plural} {what} ({', '.join(keys[:_SHOWN])}{more})"
