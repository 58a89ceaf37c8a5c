"""Modules as plain data: a class name from an allow-list and constructor arguments.

    nn.Linear(3, 8)  <->  "torch.nn.Linear", {"in_features": 3, "out_features": 8, "bias": True}

Configurations are read back from attributes of the constructor's own argument names. Whether that
was enough is not assumed: every module is rebuilt, on the meta device, and compared.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError, LoadError
from floorplan.layers import (
    activations,
    average_pools,
    branch,
    dropout,
    factor,
    fused,
    lite,
    lora,
    lossy,
    max_pools,
    paper,
    plain,
    promises,
)
from floorplan.store.graphs import Reader, encode_value
from floorplan.text import first_line, short
from floorplan.torch_doors import buffers_of, hooks_of, parameters_of, transient_of

# Containers, modules that hold callables, and modules whose arguments leave no attributes.
_EXCLUDED = frozenset(
    """Module Container Sequential ModuleList ModuleDict ParameterList ParameterDict RNNBase
    RNNCellBase NLLLoss2d AdaptiveLogSoftmaxWithLoss TripletMarginWithDistanceLoss""".split()
)
_RNN = "input_size hidden_size num_layers bias batch_first dropout bidirectional".split()

# Arguments that the signature hides behind *args.
_FIELDS: dict[type[nn.Module], list[str]] = {
    nn.LSTM: [*_RNN, "proj_size"],
    nn.GRU: _RNN,
    nn.RNN: [*_RNN, "nonlinearity"],
}

# Arguments kept under another name or form.
_READ: dict[tuple[type[nn.Module], str], Callable[[Any], Any]] = {
    (nn.MultiheadAttention, "bias"): lambda m: m.in_proj_bias is not None,
    (nn.MultiheadAttention, "add_bias_kv"): lambda m: m.bias_k is not None,
    (nn.PairwiseDistance, "p"): lambda m: m.norm,
}

# Placement, deprecated spellings, and arguments that have no plain value.
_SKIPPED = frozenset("device dtype min_value max_value size_average reduce process_group".split())

# Names under which files hold floorplan's own modules: they stay, wherever the classes live.
_STORED: dict[str, type[nn.Module]] = {
    "floorplan.branch.RankBranch": branch.RankBranch,
    "floorplan.canonical.AnyBatchNorm": plain.AnyBatchNorm,
    "floorplan.canonical.Clamp": plain.Clamp,
    "floorplan.compact.PackedActivation": activations.PackedActivation,
    "floorplan.compact_dropout.PackedDropout": dropout.PackedDropout,
    "floorplan.compact_means.ShapeAdaptiveAvgPool": average_pools.ShapeAdaptiveAvgPool,
    "floorplan.compact_means.ShapeAvgPool": average_pools.ShapeAvgPool,
    "floorplan.compact_pools.PackedMaxPool": max_pools.PackedMaxPool,
    "floorplan.factor.FactorConv": factor.FactorConv,
    "floorplan.fused.ChannelAffine": fused.ChannelAffine,
    "floorplan.fused.FusedConv": fused.FusedConv,
    "floorplan.lite.FrozenConv": lite.FrozenConv,
    "floorplan.lite.LiteResidual": lite.LiteResidual,
    "floorplan.lite.TinySite": lite.TinySite,
    "floorplan.lossy.LossyActivation": lossy.LossyActivation,
    "floorplan.paper_site.PaperSite": paper.PaperSite,
    "floorplan.remat_region.Forgetful": promises.Forgetful,
    "floorplan.remat_region.Keep": promises.Keep,
    "floorplan.remat_region.Promise": promises.Promise,
    "floorplan.reparam.LoraC": lora.LoraC,
    "floorplan.reparam.LoraCOfficial": lora.LoraCOfficial,
    "floorplan.reparam.SideConv": lora.SideConv,
    "floorplan.trace.TrainingFlag": plain.TrainingFlag,
}


@cache
def torch_classes() -> dict[str, type[nn.Module]]:
    """Leaf modules of torch.nn by qualified name."""
    found = {}
    for name in nn.modules.__all__:
        cls = getattr(nn, name)
        if name not in _EXCLUDED and not name.startswith(("Lazy", "Transformer")):
            found[f"torch.nn.{name}"] = cls
    return found


def own_classes() -> dict[str, type[nn.Module]]:
    """floorplan's own modules by the name that files hold."""
    return _STORED


def class_name(module: nn.Module) -> str | None:
    """The name under which a file stores the module's class; None if it is not on the list."""
    cls = type(module)
    tables = (torch_classes, own_classes)
    return next((name for t in tables for name, c in t().items() if c is cls), None)


def _fields(cls: type[nn.Module]) -> list[str]:
    if cls in _FIELDS:
        return _FIELDS[cls]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls).parameters.values()
    named = [p.name for p in parameters if p.kind not in variadic]
    return [n for n in named if n not in _SKIPPED and not n.startswith("_")]


def _argument(module: nn.Module, name: str) -> Any:
    read = _READ.get((type(module), name))
    value = read(module) if read else getattr(module, name)
    if name == "bias" and (value is None or isinstance(value, Tensor)):
        return value is not None
    return value


def config_of(module: nn.Module, where: str) -> dict[str, Any]:
    """Constructor arguments as encoded plain data; FloorplanError if they cannot be read back."""
    if type(module) in own_classes().values():
        values: Mapping[str, Any] = module.config()  # type: ignore[operator]
    else:
        try:
            values = {n: _argument(module, n) for n in _fields(type(module))}
        except AttributeError as e:
            raise FloorplanError(f"{where}: {e}, so it cannot be stored as data") from e
    return {k: encode_value(v, f"{where}, argument {k}") for k, v in values.items()}


def build(name: str, config: dict[str, Any], reader: Reader, where: str) -> nn.Module:
    """A module of an allowed class on the meta device; LoadError if class or config is wrong."""
    cls = torch_classes().get(name) or own_classes().get(name)
    if cls is None:
        raise LoadError(f"{where}: class {short(name)} is not on the allow-list; refused")
    arguments = {k: reader.value(v, f"{where}, argument {short(k)}") for k, v in config.items()}
    if name.startswith("torch.nn.") and set(arguments) != set(_fields(cls)):
        raise LoadError(f"{where}: arguments do not fit {name}; written for another torch?")
    try:
        with torch.device("meta"):
            module = cls(**arguments)
        again = config_of(module, where)
    except Exception as e:
        raise LoadError(f"{where}: arguments do not fit {name} ({first_line(e)}); refused") from e
    if repr(sorted(again.items())) != repr(sorted(config.items())):
        raise LoadError(f"{where}: arguments of {name} do not read back as written; refused")
    return module


def encode_module(module: nn.Module, where: str) -> tuple[str, dict[str, Any]]:
    """Class name and configuration of a leaf module; FloorplanError says why it is not data."""
    for m in module.modules():
        refuse_code(m, where)
    name = class_name(module)
    if name is None:
        cls = type(module)
        raise FloorplanError(
            f"{where} ({cls.__module__}.{cls.__qualname__}) is not a torch.nn module: adapted.pt"
            " holds data only; trace into it, or keep it out of the rewritten model"
        )
    config = config_of(module, where)
    rebuilt = build(name, config, Reader(), where)
    different = _difference(module, rebuilt)
    if different:
        raise FloorplanError(
            f"{where} ({name}): {different}, which its constructor arguments do not say; adapted.pt holds data only"
        )
    return name, config


def refuse_code(m: nn.Module, where: str) -> None:
    """Raise FloorplanError if hooks, parametrizations or a patched forward hang on this module."""
    if hasattr(m, "parametrizations"):
        raise FloorplanError(
            f"{where}: is parametrized, which is code; call torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if hooks := hooks_of(m):
        raise FloorplanError(f"{where}: has {next(iter(hooks))}, which are code; remove them first")
    if "forward" in vars(m):
        raise FloorplanError(f"{where}: its forward was replaced by hand; adapted.pt has no code")


def _difference(module: nn.Module, rebuilt: nn.Module) -> str:
    """What tells two modules of one class apart, tensor values aside; "" if nothing."""
    if [type(m) for m in module.modules()] != [type(m) for m in rebuilt.modules()]:
        return "its submodules were changed"
    if _shapes(module) != _shapes(rebuilt):
        return "its parameters or buffers were changed"
    if repr(module) != repr(rebuilt):
        return "its attributes were changed"
    for m, r in zip(module.modules(), rebuilt.modules(), strict=True):
        for key, value in vars(m).items():
            if key not in vars(r):
                if hasattr(type(m), key):
                    return f"its {key} was replaced by hand"
            elif key.startswith("_") or key == "training":
                continue
            elif repr(value) != repr(vars(r)[key]):
                return f"its attribute {key} was changed"
    return ""


def _shapes(module: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and shape of every tensor of a module."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, m in module.named_modules():
        for name, p in parameters_of(m).items():
            if p is not None:
                shapes[f"{path}.{name}"] = ("parameter", tuple(p.shape))
        for name, b in buffers_of(m).items():
            if b is not None:
                kept = name not in transient_of(m)
                shapes[f"{path}.{name}"] = ("buffer" if kept else "transient", tuple(b.shape))
    return shapes
