"""Modules as plain data: a class name from an allow-list and constructor arguments.

    nn.Linear(3, 8)  <->  "torch.nn.Linear", {"in_features": 3, "out_features": 8, "bias": True}

Configurations are read back from attributes of the constructor's own argument names. Whether that
was enough is not assumed: every module is rebuilt, on the meta device, and compared.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from floorplan import layers
from floorplan.errors import FloorplanError, LoadError, first_line, short
from floorplan.layers.layer import Layer
from floorplan.store.admit import SCRIPT, admit, is_module_class, is_under
from floorplan.store.graphs import Reader, encode_value, require
from floorplan.store.tensors import registered_as
from floorplan.torch_doors import hooks_of, tensors_of

# Containers, modules that hold callables, and modules whose arguments leave no attributes.
_EXCLUDED = frozenset(
    """Module Container Sequential ModuleList ModuleDict ParameterList ParameterDict RNNBase
    RNNCellBase NLLLoss2d AdaptiveLogSoftmaxWithLoss TripletMarginWithDistanceLoss""".split()
)
_RNN = "input_size hidden_size num_layers bias batch_first dropout bidirectional".split()

# Arguments that the signature hides behind *args.
_FIELDS: dict[type, list[str]] = {nn.LSTM: [*_RNN, "proj_size"], nn.GRU: _RNN, nn.RNN: [*_RNN, "nonlinearity"]}

# Arguments kept under another name or form.
_READ: dict[tuple[type[nn.Module], str], Callable[[Any], Any]] = {
    (nn.MultiheadAttention, "bias"): lambda m: m.in_proj_bias is not None,
    (nn.MultiheadAttention, "add_bias_kv"): lambda m: m.bias_k is not None,
    (nn.PairwiseDistance, "p"): lambda m: m.norm,
}

# Placement, deprecated spellings, and arguments that have no plain value.
_SKIPPED = frozenset("device dtype min_value max_value size_average reduce process_group".split())


@cache
def torch_classes() -> dict[str, type[nn.Module]]:
    """Leaf modules of torch.nn by qualified name."""
    named = (n for n in nn.modules.__all__ if n not in _EXCLUDED and not n.startswith(("Lazy", "Transformer")))
    return {f"torch.nn.{n}": getattr(nn, n) for n in named}


@cache
def own_classes() -> dict[str, type[Layer]]:
    """floorplan's own layers by the name that files hold: it stays, wherever a class lives."""
    for m in pkgutil.iter_modules(layers.__path__, f"{layers.__name__}."):
        importlib.import_module(m.name)
    found, left = {}, [Layer]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if cls.__module__.startswith(f"{layers.__name__}.") and "stored" in vars(cls) and cls.stored:
            found[cls.stored] = cls
    return found


def class_name(module: nn.Module, allow: Sequence[str] = ()) -> str | None:
    """The name of the module's class in a file; None if it may have none: it is no Layer, of no package of `allow`."""
    cls = type(module)
    if (name := next((n for t in (torch_classes, own_classes) for n, c in t().items() if c is cls), None)) is not None:
        return name
    name = f"{cls.__module__}.{cls.__qualname__}"
    return name if isinstance(module, Layer) or is_under(name, allow) else None


def packages_of(model: nn.Module) -> list[str]:
    """The modules from outside whose layers a model has: what must be allowed to load it again."""
    own = set(own_classes().values())
    return sorted({type(m).__module__ for m in model.modules() if isinstance(m, Layer) and type(m) not in own})


def _fields(cls: type[nn.Module]) -> list[str]:
    if cls in _FIELDS:
        return _FIELDS[cls]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [n for n, p in inspect.signature(cls).parameters.items() if p.kind not in variadic]
    return [n for n in named if n not in _SKIPPED and not n.startswith("_")]


def _argument(module: nn.Module, name: str) -> Any:
    read = _READ.get((type(module), name))
    value = read(module) if read else getattr(module, name)
    return value is not None if name == "bias" and isinstance(value, Tensor | None) else value


def config_of(module: nn.Module, where: str) -> dict[str, Any]:
    """Constructor arguments as encoded plain data; FloorplanError if they cannot be read back."""
    if isinstance(module, Layer):
        values: Mapping[str, Any] = module.config()
    else:
        try:
            values = {n: _argument(module, n) for n in _fields(type(module))}
        except AttributeError as e:
            raise FloorplanError(f"{where}: {e}, so it cannot be stored as data") from e
    return {k: encode_value(v, f"{where}, argument {k}") for k, v in values.items()}


def build(name: str, config: dict[str, Any], reader: Reader, where: str) -> nn.Module:
    """A module of an allowed class on the meta device; LoadError if class or config is wrong."""
    cls = torch_classes().get(name) or own_classes().get(name) or _outside(name, reader.allow, where)
    return _construct(cls, name, config, reader, where)


def _outside(name: str, allow: Sequence[str], where: str) -> Any:
    """The class of a package that the user allows; LoadError says how to allow it."""
    package, way = name.partition(".")[0], ""
    if all(p.isidentifier() for p in name.split(".")) and package not in {*sys.stdlib_module_names, "torch"}:
        if is_under(name, allow):
            found = admit(name, where, allow)
            require(is_module_class(found), f"{where}: {short(name)} is no torch.nn.Module")
            return found
        way = f'; --allow {package}, in Python load(…, allow=("{package}",)), imports it, which runs its code'
    raise LoadError(f"{where}: class {short(name)} is not on the allow-list; refused{way}")


def _construct(cls: type[nn.Module], name: str, config: dict[str, Any], reader: Reader, where: str) -> nn.Module:
    arguments = {k: reader.value(v, f"{where}, argument {short(k)}") for k, v in config.items()}
    if name.startswith("torch.nn.") and set(arguments) != set(_fields(cls)):
        raise LoadError(f"{where}: arguments do not fit {name}; written for another torch?")
    try:
        with torch.device("meta"):
            module = cls(**arguments)
        again = config_of(module, where)
    except Exception as e:
        raise LoadError(f"{where}: arguments do not fit {name} ({first_line(e)}); refused") from e
    same = repr(sorted(again.items())) == repr(sorted(config.items()))
    require(same, f"{where}: arguments of {name} do not read back as written")
    return module


def encode_module(module: nn.Module, where: str, allow: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Class name and configuration of a leaf module; FloorplanError says why it is not data."""
    for m in module.modules():
        refuse_code(m, where)
    name, cls = class_name(module, allow), type(module)
    if name is None:
        way = "adapted.pt holds data only; trace into it, or keep it out of the rewritten model"
        raise FloorplanError(f"{where} ({cls.__module__}.{cls.__qualname__}) is not a torch.nn module: {way}")
    script = cls.__module__ == "__main__" or cls.__module__.startswith(SCRIPT)
    if isinstance(module, Layer) and (script or getattr(sys.modules[cls.__module__], cls.__qualname__, 0) is not cls):
        raise FloorplanError(f"{where}: {name} is no class that a file can name; put it into a module to be imported")
    config = config_of(module, where)
    if different := _difference(module, _construct(cls, name, config, Reader(), where)):
        lost = f"{different}, which its constructor arguments do not say"
        raise FloorplanError(f"{where} ({name}): {lost}; adapted.pt holds data only")
    return name, config


def refuse_code(m: nn.Module, where: str) -> None:
    """Raise FloorplanError if hooks, parametrizations or a patched forward hang on this module."""
    if hasattr(m, "parametrizations"):
        way = "call torch.nn.utils.parametrize.remove_parametrizations first"
        raise FloorplanError(f"{where}: is parametrized, which is code; {way}")
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
    held = ((path, m, name, t) for path, m in module.named_modules() for name, t in tensors_of(m).items())
    return {f"{path}.{name}": (_kind(m, name), tuple(t.shape)) for path, m, name, t in held if t is not None}


def _kind(m: nn.Module, name: str) -> str:
    """How a tensor is registered; a layer of ours may have its frozen ones as parameters: its owner lets them train."""
    kind = registered_as(m, name)
    return "parameter" if isinstance(m, Layer) and kind == "buffer" else kind
