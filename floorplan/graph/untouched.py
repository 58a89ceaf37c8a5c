"""What tracing must leave as it was, and what it must give the traced module besides the graph."""

import functools
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from floorplan.errors import FloorplanError
from floorplan.torch_doors import (
    CONSTANT,
    STORES,
    TorchDispatchMode,
    buffers_of,
    children_of,
    parameters_of,
    schema_of,
    storage_key,
    tensors_in,
    transient_of,
)

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_LOOKS = (getattr, operator.getitem, *_COMPARISONS, "size", "dim", "numel")


def tidy(graph: fx.Graph, lines: dict[str, str]) -> None:
    """Drop sizes and comparisons that only a decision looked at."""
    for node in reversed(list(graph.nodes)):
        if node.target in _LOOKS and node.op[:4] == "call" and not node.users:
            graph.erase_node(node)
            lines.pop(node.name, None)


def _containers(value: Any, seen: dict[int, tuple[Any, Any]]) -> None:
    """Note every list, dict and set that hangs on a value, with what it holds."""
    if isinstance(value, list | dict | set) and id(value) not in seen:
        seen[id(value)] = (value, value.copy())
        for part in value.values() if isinstance(value, dict) else value:
            _containers(part, seen)
    elif type(value) is tuple:
        for part in value:
            _containers(part, seen)


def _held(m: nn.Module) -> dict[int, tuple[Any, Any]]:
    """The containers that hang on a module's own attributes."""
    seen: dict[int, tuple[Any, Any]] = {}
    for k, v in m.__dict__.items():
        if k not in STORES and not k.endswith("_hooks"):
            _containers(v, seen)
    return seen


def _put_back(seen: dict[int, tuple[Any, Any]]) -> bool:
    """Give every noted container its contents back; whether one had changed."""
    changed = False
    for value, old in seen.values():
        if isinstance(value, list):
            same = len(value) == len(old) and all(a is b for a, b in zip(value, old, strict=True))
        elif isinstance(value, dict):
            same = value.keys() == old.keys() and all(value[k] is old[k] for k in old)
        else:
            same = value == old
        changed = changed or not same
        if not same and isinstance(value, list):
            value[:] = old
        elif not same:
            value.clear()
            value.update(old)
    return changed


@contextmanager
def same_containers(model: nn.Module) -> Iterator[None]:
    """Lists, dicts and sets on the model's modules hold afterwards what they held."""
    held = [_held(m) for m in model.modules()]
    try:
        yield
    finally:
        for seen in held:
            _put_back(seen)


def _own_code(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the model's classes, installed packages apart."""
    names = {c.__module__ for m in model.modules() for c in type(m).__mro__}
    found = [sys.modules[n] for n in names if n in sys.modules]
    return [m for m in found if "site-packages" not in str(getattr(m, "__file__", "") or "site-packages")]


@contextmanager
def no_memory(model: nn.Module) -> Iterator[None]:
    """What the model's code keeps in global containers and caches is as before afterwards."""
    seen: dict[int, tuple[Any, Any]] = {}
    values = [v for code in _own_code(model) for v in vars(code).values()]
    values += [v for m in model.modules() for c in type(m).__mro__ for v in vars(c).values()]
    for v in values:
        if type(v) in (list, dict, set):
            _containers(v, seen)
    caches = {id(v): v for v in values if isinstance(v, functools._lru_cache_wrapper)}
    filled = {i for i, c in caches.items() if c.cache_info().currsize}
    try:
        yield
    finally:
        _put_back(seen)
        for i, c in caches.items():
            if i not in filled or c.cache_info().currsize:
                c.cache_clear()  # it may hold what only tracing made


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Undo what the forward assigns to the model's attributes while it is traced; lists it."""
    before = {
        m: (dict(m.__dict__), *(dict(m.__dict__[d]) for d in STORES))
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)  # keeps its tensors elsewhere
    }
    paths = {m: n for n, m in model.named_modules()}
    changed: list[str] = []
    held = {m: _held(m) for m in before}
    # What a reparametrized weight renews whenever it is read (spectral_norm's vectors).
    renewed = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    vectors = [(b, b.detach().clone()) for m in renewed for b in m.buffers()]
    try:
        with no_memory(model):
            yield changed
    finally:
        for b, vector in vectors:
            b.data.copy_(vector)
        for m, seen in held.items():
            if _put_back(seen):
                where = paths[m] or "the model"
                changed.append(f"forward writes into a container of {where}, which the graph does not")
        for m, saved in before.items():
            stores = (m.__dict__, *(m.__dict__[d] for d in STORES))
            for store, old in zip(stores, saved, strict=True):
                for k in [k for k in store if k not in old or store[k] is not old[k]]:
                    if not k.startswith(CONSTANT):
                        what = ".".join(p for p in (paths[m], k) if p)
                        changed.append(f"forward assigns to {what}, which the graph does not")
                    store.pop(k)
                store.update({k: v for k, v in old.items() if k not in store})


def complete(have: nn.Module, want: nn.Module) -> None:
    """Give a traced module what the graph does not use of the original; mode and keys agree."""
    if have is want:
        return
    have.training = want.training
    for name, p in parameters_of(want).items():
        if name not in parameters_of(have):
            have.register_parameter(name, p)
    for name, b in buffers_of(want).items():
        if name not in buffers_of(have):
            have.__dict__.pop(name, None)  # a buffer that the forward assigns to was copied as a plain attribute
            have.register_buffer(name, b)
    transient_of(have).update(transient_of(want))
    for name, child in children_of(want).items():
        if child is not None and name in children_of(have):
            complete(cast(nn.Module, children_of(have)[name]), child)
        elif not hasattr(have, name):
            have.add_module(name, child)


MODES = ("saved", "train", "eval")


def mode_of(model: nn.Module) -> str:
    """train, eval or mixed: what the flags of the modules say whose forward can ask for them."""
    flags = {m.training for m in model.modules()}
    return "mixed" if len(flags) > 1 else "train" if True in flags else "eval"


@contextmanager
def in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """The model in train or eval mode for a while; "saved" leaves it as it is."""
    if mode not in MODES:
        raise FloorplanError(f"mode {mode}: not known; use {', '.join(MODES)}")
    flags = {m: m.training for m in model.modules()}
    if mode != "saved":
        model.train(mode == "train")
    try:
        yield
    finally:
        for m, flag in flags.items():
            m.training = flag


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients, containers and the random state are as before afterwards, whatever a forward does to them."""
    buffers = {id(b): (b, b.detach().clone(), _place_of(b)) for b in model.buffers()}
    grads = [(p, p.grad) for p in model.parameters()]
    devices = list({t.device.index for t, *_ in buffers.values() if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), same_containers(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for b, old, place in buffers.values():
                    if _place_of(b) != place:  # resized
                        size, stride, offset, nbytes = place
                        b.untyped_storage().resize_(nbytes)
                        b.data = b.detach().as_strided(size, stride, offset)
                    b.copy_(old)
            for p, g in grads:
                p.grad = g


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what an op is about to write over, of some tensors: a copy of every weight would be too much."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_storage: dict[int, list[torch.Tensor]] = {}
        for t in kept:
            self.by_storage.setdefault(storage_key(t), []).append(t)
        self.old: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, a in enumerate(schema_of(func).arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                for t in tensors_in(args[i] if i < len(args) else kwargs.get(a.name)):
                    for p in self.by_storage.pop(storage_key(t), ()):
                        self.old.append((p, p.detach().clone()))
        return func(*args, **kwargs)


@contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Parameters are as before afterwards, whatever a real forward writes into them or puts in their place."""
    before = [(p, p.data) for p in model.parameters()]
    writes = _Writes([data for _, data in before])
    try:
        with writes:
            yield
    finally:
        for p, data in before:
            if storage_key(p) != storage_key(data) or p.shape != data.shape:
                p.data = data
        for data, old in writes.old:
            data.copy_(old)


def _place_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()
