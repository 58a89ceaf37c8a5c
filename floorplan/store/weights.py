"""Copy a state_dict into a module: every key, every shape, nothing skipped in silence.

{"state_dict": {"module.conv.weight": t}}  ->  conv.weight    every step is said aloud
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from floorplan.errors import LoadError, describe
from floorplan.store.inert import Nothing
from floorplan.store.recognize import load_error

# Where training scripts put a model or its state_dict inside a checkpoint, likeliest first.
NESTED = tuple(
    """state_dict model model_state_dict net module network weights params
    ema model_ema state_dict_ema ema_state_dict params_ema""".split()
)
_LEVELS = 4  # a state_dict lies no deeper in a checkpoint
_SHOWN = 3

_State = dict[str, torch.Tensor]


def is_state_dict(found: object) -> bool:
    """Whether `found` is a mapping from names to tensors, and not empty."""
    items = found.items() if isinstance(found, Mapping) else ()
    return bool(items) and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in items)


def copy_weights(module: nn.Module, found: object, path: str, keep_head: bool = False) -> tuple[str, ...]:
    """Copy what was read from `path` into `module`; LoadError unless all of it fits.

    keep_head: tensors that differ from the module's in the number of outputs alone keep the module's values.
    """
    try:
        given, notes = _state_dict_in(found, path)
        expected = module.state_dict()
        given = _strip(given, expected, path, notes)
        given = _with_own_head(given, expected, notes) if keep_head else given
        _compare(given, expected, path, notes)
        module.load_state_dict(given, strict=True)
    except LoadError:
        raise
    except Exception as e:
        raise load_error(path, f"does not fit the model ({describe(e)})") from e
    return tuple(notes)


def _state_dict_in(found: object, path: str) -> tuple[_State, list[str]]:
    notes: list[str] = []
    for _ in range(_LEVELS):
        if not isinstance(found, Mapping) or is_state_dict(found) or (key := _key_of_weights(found)) is None:
            break
        others = [k for k in NESTED if k != key and isinstance(found.get(k), Mapping | nn.Module) and found[k]]
        more = f"; the file has {', '.join(map(repr, others))} too" if others else ""
        notes.append(f"took the weights under the key {key!r}{more}")
        found = found[key]
    if isinstance(found, nn.Module):
        notes.append(f"took the weights of the {type(found).__name__} saved in the file")
        found = found.state_dict()
    if isinstance(found, Nothing):
        raise found.refusal
    if not isinstance(found, Mapping):
        raise load_error(path, f"holds a {type(found).__name__}, not a state_dict")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            what = f"{key!r} is a {type(value).__name__}, not a tensor"
            raise load_error(path, f"holds a dict, but not a state_dict ({what})")
    if not found:
        raise load_error(path, "holds an empty state_dict")
    return dict(found), notes


def _key_of_weights(found: Mapping[Any, Any]) -> Any:
    """Where the weights are in a checkpoint: under a usual name, or in the only state_dict; None if nowhere."""
    usual = [k for k in NESTED if found.get(k) is not None]
    kinds = (is_state_dict, lambda v: isinstance(v, nn.Module), lambda v: isinstance(v, Mapping), _is_unread)
    for fits in kinds:
        if (key := next((k for k in usual if fits(found[k])), None)) is not None:
            return key
    states = [k for k, v in found.items() if is_state_dict(v)]
    return states[0] if len(states) == 1 else None


def _is_unread(value: object) -> bool:
    return isinstance(value, Nothing)


def _strip(given: _State, expected: Mapping[str, Any], path: str, notes: list[str]) -> _State:
    """Drop what wrappers put before every key, and the counter of an averaged model, where the model has none such."""
    if "n_averaged" in given and "n_averaged" not in expected and len(given) > 1:
        notes.append("left out n_averaged, the counter of an averaged model")
        given = {k: v for k, v in given.items() if k != "n_averaged"}
    if (whole := _under_one_prefix(given, expected)) is not None and len(whole) < len(given):
        left = [k for k in given if not any(v is given[k] for v in whole.values())]
        notes.append(f"took the {len(whole)} weights that fit and left out {_few(left, 'beside them')}")
        return whole
    dotted = [k.split(".") for k in given]
    shared = list(takewhile(lambda parts: len(set(parts)) == 1, zip(*(k[:-1] for k in dotted), strict=False)))
    fitting = [len(expected.keys() & {".".join(k[n:]) for k in dotted}) for n in range(len(shared) + 1)]
    for part, *_ in shared[: fitting.index(max(fitting))]:
        given = {k.removeprefix(f"{part}."): v for k, v in given.items()}
        notes.append(f"stripped the '{part}.' prefix of {len(given)} keys")
    inner = [k for k in given if "_orig_mod." in k]
    if inner and not any("_orig_mod." in k for k in expected):
        plain = {k.replace("_orig_mod.", ""): v for k, v in given.items()}
        if len(plain) < len(given):
            raise load_error(path, "has keys both with and without '_orig_mod.'")
        given = plain
        notes.append(f"stripped '_orig_mod.' inside {len(inner)} keys")
    return given


def _under_one_prefix(given: _State, expected: Mapping[str, Any]) -> _State | None:
    """The weights under the first prefix behind which all of the model's own names stand, and no others."""
    first = next(iter(expected), "")
    for prefix in (k.removesuffix(first) for k in given if first and k.endswith(f".{first}")):
        inside = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
        if inside.keys() == expected.keys():
            return inside
    return None


def _with_own_head(given: _State, expected: Mapping[str, Any], notes: list[str]) -> _State:
    """The weights with the model's own tensors where they differ in the number of outputs."""
    own = {k: expected[k] for k in given if k in expected and _is_other_head(given[k], expected[k])}
    if own:
        sizes = [f"{k} ({given[k].shape[0]} in the file, {t.shape[0]} here)" for k, t in own.items()]
        notes.append(f"kept the model's own {', '.join(sizes[:_SHOWN])}{', …' if sizes[_SHOWN:] else ''}")
    return given | own


def _is_other_head(has: torch.Tensor, wants: Any) -> bool:
    """Whether a tensor differs from the model's in its first size, the outputs of a layer, alone."""
    sized = isinstance(wants, torch.Tensor) and has.dim() == wants.dim() > 0
    return sized and has.shape != wants.shape and has.shape[1:] == wants.shape[1:]


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
        heads = [k for k in both if _is_other_head(given[k], expected[k])]
        way = "; --keep-head keeps the model's own" if len(parts) == 1 and 0 < len(heads) == len(shapes) else ""
        raise load_error(path, "does not fit the model: " + "; ".join(parts) + way)
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
