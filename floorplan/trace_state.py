"""What tracing must leave as it was, and what it must give the traced module besides the graph."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import fx, nn

from floorplan.tracer import Tracer, refuse_checkpoints

_LOOKS = (getattr, operator.getitem, operator.eq, operator.ne, operator.lt, operator.le,
          operator.gt, operator.ge, "size", "dim", "numel")  # fmt: skip


def tidy(graph: fx.Graph, lines: dict[str, str]) -> None:
    """Drop sizes and comparisons that only a decision looked at."""
    for node in reversed(list(graph.nodes)):
        if node.target in _LOOKS and node.op[:4] == "call" and not node.users:
            graph.erase_node(node)
            lines.pop(node.name, None)


@contextmanager
def no_checkpoints(tracer: Tracer) -> Iterator[None]:
    """Make activation checkpointing, which fx would inline in silence, refuse to be traced."""
    module = torch.utils.checkpoint
    generator = "_checkpoint_without_reentrant_generator"
    refuse = refuse_checkpoints(tracer, getattr(module, generator))
    refuse_old = refuse_checkpoints(tracer, module.CheckpointFunction.apply)
    with patch.object(module, generator, refuse):
        with patch.object(module.CheckpointFunction, "apply", refuse_old):
            yield


_DICTS = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Undo what the forward assigns to the model's attributes while it is traced; lists it."""
    before = {
        m: (dict(m.__dict__), *(dict(m.__dict__[d]) for d in _DICTS))
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)  # keeps its tensors elsewhere
    }
    paths = {m: n for n, m in model.named_modules()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for m, saved in before.items():
            stores = (m.__dict__, *(m.__dict__[d] for d in _DICTS))
            for store, old in zip(stores, saved, strict=True):
                for k in [k for k in store if k not in old or store[k] is not old[k]]:
                    if not k.startswith("_tensor_constant"):
                        what = ".".join(p for p in (paths[m], k) if p)
                        changed.append(f"forward assigns to {what}, which the graph does not")
                    store.pop(k)
                store.update({k: v for k, v in old.items() if k not in store})


def complete(have: nn.Module, want: nn.Module) -> None:
    """Give a traced module what the graph does not use of the original; mode and keys agree."""
    if have is want:
        return
    have.training = want.training
    for name, p in want._parameters.items():
        if name not in have._parameters:
            have.register_parameter(name, p)
    for name, b in want._buffers.items():
        if name not in have._buffers:
            have.__dict__.pop(name, None)  # a buffer that the forward assigns to was copied as a plain attribute
            have.register_buffer(name, b)
    have._non_persistent_buffers_set |= want._non_persistent_buffers_set
    for name, child in want._modules.items():
        if child is not None and name in have._modules:
            complete(cast(nn.Module, have._modules[name]), child)
        elif not hasattr(have, name):
            have.add_module(name, child)
