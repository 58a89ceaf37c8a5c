"""Find an input that a model accepts, by running it on fake tensors; nothing is allocated."""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, describe, fault_of_sizes
from floorplan.layers.layer import Adapter
from floorplan.layers.targets import detection_ops
from floorplan.ledger.fakes import concrete_fakes
from floorplan.torch_doors import ConvNd, tensors_in, tree_map, wants_values

Shape = Sequence[int] | Mapping[str, Sequence[int]]  # of an argument; of a dict's tensors
POSITIONS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: tuple((n,) for n in (128, 60, 64, 100, 200, 256, 300, 500, 512, 1000, 1024, 4096, 16000)),
    2: tuple((n, n) for n in (224, 32, 28, 64, 96, 128, 256, 299, 227, 240, 320, 384, 512)),
    3: ((16, 112, 112), (32, 32, 32), (16, 64, 64), (64, 64, 64), (8, 224, 224)),
}


def make_inputs(model: nn.Module, shapes: Sequence[Shape], batch: int) -> tuple[Any, ...]:
    """Random inputs of (batch, *shape) each, in the model's dtype and on its device."""
    like = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), None)
    dtype, device = (torch.get_default_dtype(), torch.device("cpu")) if like is None else (like.dtype, like.device)
    g = torch.Generator().manual_seed(0)

    def of(s: Shape) -> Any:
        if isinstance(s, Mapping):
            return {k: of(v) for k, v in s.items()}
        return torch.randn(batch, *s, generator=g, dtype=torch.float32).to(device, dtype)

    return tuple(of(s) for s in shapes)


def shapes_of(inputs: Sequence[Any]) -> list[Any]:
    """Shapes of tensors, and of dicts of them, as JSON; other arguments have none."""
    some = [v for v in inputs if isinstance(v, Tensor) or (isinstance(v, dict) and all(map(_is_tensor, v.values())))]
    return [{k: list(t.shape) for k, t in v.items()} if isinstance(v, dict) else list(v.shape) for v in some]


def of_one(shapes: Sequence[Any]) -> list[Shape]:
    """The same of one sample."""
    return [{k: tuple(n[1:]) for k, n in s.items()} if isinstance(s, Mapping) else tuple(s[1:]) for s in shapes]


def _is_tensor(v: Any) -> bool:
    return isinstance(v, Tensor)


def infer_shape(model: nn.Module) -> tuple[tuple[int, ...], str]:
    """(shape without batch, how it was found). FloorplanError if nothing fits."""
    why: Exception | None = None
    for shape, how in _candidates(model):
        if (e := _refusal(model, make_inputs(model, [shape], 2))) is None:
            return shape, how
        if why is None and not fault_of_sizes(e):
            why = e
    if why is not None and len(_required(model)) < 2:
        what = f"forward does not take one tensor of floats ({describe(why, 120)})"
        raise FloorplanError(f"input: {what}; give the inputs themselves, in Python")
    lost = "no size could be inferred from the model's layers"
    raise FloorplanError(f"input: {lost}; give --input C,H,W (one for each input)")


def _required(model: nn.Module) -> list[str]:
    """Names of the arguments that a forward cannot do without."""
    every = inspect.signature(model.forward).parameters.values()
    return [p.name for p in every if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _candidates(model: nn.Module) -> Iterator[tuple[tuple[int, ...], str]]:
    if declared := getattr(model, "example_input_shape", None):
        yield tuple(declared), "the model's example_input_shape"
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(config, dict) and config.get("input_size"):
        yield tuple(config["input_size"]), "the model's pretrained_cfg"
    if (conv := next((m for m in model.modules() if _spatial(m)), None)) is not None:
        nd, channels = _spatial(conv), int(cast(Any, conv).in_channels)
        how = f"a first conv of {channels} channels and a size that the whole model accepts"
        for position, c in itertools.product(POSITIONS[nd], dict.fromkeys((channels, 1, 3))):
            yield (c, *position), how
        for (n,) in POSITIONS[1]:
            yield (channels, n), how
    if (linear := next((m for m in model.modules() if isinstance(m, nn.Linear)), None)) is not None:
        yield (linear.in_features,), f"a first Linear of {linear.in_features} features"


def _spatial(m: Any) -> int:
    if isinstance(m, Adapter):
        return len(m.geo.kernel) if m.geo is not None and m.in_channels else 0
    if isinstance(m, ConvNd) and not isinstance(m.weight, nn.UninitializedParameter):
        return m.weight.dim() - 2
    return 0


def _refusal(model: nn.Module, inputs: tuple[Any, ...]) -> Exception | None:
    """Why these do not go through the model, as far as fake tensors tell; None if they do."""
    try:
        concrete_fakes(model, inputs).forward()
    except Exception as e:  # whatever a model raises, it does not accept this size
        return None if wants_values(e) else e
    return None


def _takes(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    return _refusal(model, inputs) is None


def smaller_inputs(gm: nn.Module, inputs: Sequence[Any], side: int = 64) -> tuple[Any, ...]:
    """Inputs for verification: batch 2 and positions of at most `side`, if the graph accepts them."""
    if reads_places(gm):
        return tuple(inputs)
    most = max((t.numel() for t in tensors_in(tuple(inputs))), default=0)
    whole, small = _of_two(gm, inputs, most), shrunk(gm, inputs, side)
    if whole is None or not _takes(gm, whole):
        return tuple(inputs)  # its first axis is no batch, or comes in whole groups
    return small if small is not None and _takes(gm, small) else whole


def shrunk(gm: nn.Module, inputs: Sequence[Any], side: int = 64) -> tuple[Any, ...] | None:
    """One input with batch 2 and positions of at most `side`, which nobody has tried; None for others."""
    return _of_two(gm, inputs, side) if len(inputs) == 1 and not reads_places(gm) else None


def reads_places(gm: nn.Module) -> bool:
    """Whether an op takes numbers of samples and positions from its input: made up ones may lie outside of memory."""
    calls = gm.graph.nodes if isinstance(gm, fx.GraphModule) else ()
    return any(n.target in detection_ops() for n in calls)


def _of_two(gm: nn.Module, inputs: Sequence[Any], side: int) -> tuple[Any, ...] | None:
    """Two random samples of these maps, cut to `side`; None where some input is no floating-point map."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2 for t in inputs):
        return None
    return make_inputs(gm, [(t.shape[1], *(min(n, side) for n in t.shape[2:])) for t in inputs], 2)


def filled(inputs: Sequence[Any], batch: int) -> tuple[Any, ...]:
    """Inputs like these with another batch size: seeded random numbers, labels repeated."""
    g = torch.Generator().manual_seed(0)

    def of(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim():
            return t
        if not t.is_floating_point():
            return t[:1].expand(batch, *t.shape[1:]).clone()
        return torch.randn(batch, *t.shape[1:], generator=g).to(t)

    return tuple(tree_map(of, tuple(inputs)))


def resized(t: Any, batch: int) -> Any:
    """Tensors like those in t of another batch, in their memory order, values unset; anything else as it is."""

    def of(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim():
            return t
        strides = t.stride()
        order = sorted(range(t.dim()), key=lambda d: (-strides[d], d))
        made = torch.empty_permuted((batch, *t.shape[1:]), order, dtype=t.dtype, device=t.device)
        return made.requires_grad_(t.requires_grad)

    return tree_map(of, t)


def arguments(inputs: Any) -> tuple[Any, ...]:
    """What a user gave for a forward, its arguments or its only one, as arguments."""
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
