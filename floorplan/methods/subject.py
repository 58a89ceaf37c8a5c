"""What a user named, loaded, with inputs to run it on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, LoadError, ReadsValues, first_line
from floorplan.ledger.inputs import Shape, arguments, infer_shape, make_inputs, of_one
from floorplan.ledger.run import Step, run
from floorplan.store.artifact import load_artifact
from floorplan.store.load import Loaded, load_model
from floorplan.torch_doors import tree_iter

Shapes = Sequence[Shape]


def read_adapted(path: str | Path, allow: Sequence[str] = ()) -> fx.GraphModule:
    """The graph of an adapted.pt, tried on fake tensors of the sizes that it records; LoadError if it is refused."""
    return _tried(load_artifact(path, allow=allow), path)


def _tried(gm: fx.GraphModule, path: str | Path) -> fx.GraphModule:
    """A graph whose parts do not fit is refused here, by a run on fake tensors, not when it trains."""
    meta = gm.meta["floorplan"]
    if (shapes := meta.get("input")) is None or not meta.get("plain", False):
        return gm
    like = next((t for t in gm.buffers() if t.is_floating_point()), torch.zeros(()))
    try:
        inputs = [like.new_zeros(()).expand(s) for s in shapes]
        run(Step(gm, tuple(inputs)))
    except ReadsValues:
        pass
    except Exception as e:
        raise LoadError(f"{path}: its graph does not run on the inputs it records: {first_line(e)}") from e
    return gm


@dataclass(frozen=True)
class Source:
    """A model as a user names it, what to run it on, and how a file of it is loaded."""

    model: nn.Module | str | Path
    inputs: Any = None  # example arguments; their values are not read
    batch: int | None = None
    shapes: Shapes | None = None  # of one sample, once for each input
    weights: str | None = None
    allow: Sequence[str] = ()
    trust: bool = False
    keep_head: bool = False  # a layer whose weights have another number of outputs keeps its own


@dataclass(frozen=True)
class Subject:
    """A model with inputs to run it on, and what had to be said on the way."""

    model: nn.Module
    name: str
    inputs: tuple[Any, ...]
    notes: tuple[str, ...]


def loaded(source: Source) -> Loaded:
    """The file or factory that a source names."""
    how: dict[str, Any] = {"allow": source.allow, "trust": source.trust, "keep_head": source.keep_head}
    return load_model(str(source.model), weights=source.weights, **how)


def subject_of(source: Source) -> Subject:
    """Load what a user named, and find inputs for it."""
    notes: list[str] = []
    model, shapes = source.model, source.shapes
    sizes = [1 if source.batch is None else source.batch, *(n for n in tree_iter(list(shapes or ())))]
    if min(sizes) < 1:
        raise FloorplanError(f"input: {min(sizes)} is no size; batch and shapes are positive")
    if isinstance(model, str | Path):
        found = loaded(source)
        model, name = found.module, found.source
        notes += found.notes
        if isinstance(model, fx.GraphModule) and "floorplan" in model.meta:
            _tried(model, name)
    elif isinstance(model, torch.jit.ScriptModule):
        raise FloorplanError("model: a TorchScript module has no Python forward to trace; give the eager model")
    elif isinstance(model, nn.Module):
        name = type(model).__name__
    else:
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise FloorplanError(f"model: {what} is no model; give an nn.Module instance, a file or a factory's name")
    if source.inputs is not None:
        args = arguments(source.inputs)
        bad = next((a for a in tree_iter(args) if not isinstance(a, _INPUTS)), None)
        if bad is not None:
            raise FloorplanError(f"inputs: a {type(bad).__name__} among them; give tensors, or containers of tensors")
        return Subject(model, name, args, tuple(notes))
    if shapes is None and (recorded := getattr(model, "meta", {}).get("floorplan", {}).get("input")):
        shapes = of_one(recorded)
        notes.append(f"input {json.dumps(shapes)} as recorded when it was adapted; --input sets it")
    if shapes is None:
        shape, how = infer_shape(model)
        shapes = [shape]
        notes.append(f"input {list(shape)} inferred from {how}; --input sets it")
    return Subject(model, name, make_inputs(model, shapes, source.batch or DEFAULT_BATCH), tuple(notes))


DEFAULT_BATCH = 8
_INPUTS = (Tensor, int, float, bool, str, torch.dtype, torch.device, type(None))
