"""Which globals a model file may name, and why not the others.

plain data of torch                  -> yes
Module class or enum, listed package -> yes, once its module is imported
F.relu and kin                       -> yes
anything else                        -> refused, with the way out
"""

import enum
import importlib
import importlib.util
import site
import sys
import sysconfig
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from floorplan.errors import LoadError, describe
from floorplan.layers.activations import ACTIVATIONS
from floorplan.store.recognize import load_error

ADMITTED = tuple(
    """torch.nn.modules torch.nn.parallel.data_parallel torchvision.models torchvision.ops torchvision.transforms
    timm.models timm.layers""".split()
)
SCRIPT = "floorplan_user_"  # the module of a factory's file begins so
# What a model of layers and tensors is made of; a strict part of what torch's own reader allows.
_PLAIN = frozenset(
    """builtins.bytearray builtins.complex builtins.set _codecs.encode collections.Counter collections.OrderedDict
    torch.Size torch.Tensor torch.device torch.nn.parameter.Parameter torch._tensor._rebuild_from_type_v2
    torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state torch._utils._rebuild_tensor
    torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 torch._utils._rebuild_meta_tensor_no_storage
    torch.storage.TypedStorage torch.storage.UntypedStorage""".split()
)
_FUNCTIONS = {f for a in ACTIVATIONS.values() for f in a.functions.split() if hasattr(nn.functional, f)}
_OWN_REASONS = {
    "torch.fx": "a pickled fx.GraphModule is rebuilt by running source text in the file; "
    "save the module it was traced from",
    "torch.jit": "it holds TorchScript, which cannot be analysed; save the eager model",
    "torch._dynamo": "it was saved compiled; save model._orig_mod",
    "torch.nn.parallel.distributed": "it was saved wrapped for DDP; save model.module",
    "functools.partial": "a partial can call any code; save the state_dict, name a factory",
    "__main__": "the script that saved it cannot be imported again; name a factory "
    "path/to/script.py:factory and pass its state_dict with --weights",
}
_CODE_CLASSES = set(
    """torch.fx.graph_module.GraphModule torch.jit._script.ScriptModule torch._dynamo.eval_frame.OptimizedModule
    torch.distributed.nn.api.remote_module._RemoteModule""".split()
)


@contextmanager
def import_path(folder: str) -> Iterator[None]:
    """Let the user's own code be imported from `folder`, last: it hides no installed package."""
    entry = str(Path(folder).resolve())
    sys.path.append(entry)
    try:
        yield
    finally:
        if entry in sys.path:
            # The last one: the same folder may stand at the front for other reasons.
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(entry)]


def modern(arg: str) -> str:
    """`module.name` of a GLOBAL opcode; the Python 2 names that protocol 2 writes are mapped."""
    module, _, attribute = arg.partition(" ")
    module, attribute = NAME_MAPPING.get((module, attribute), (IMPORT_MAPPING.get(module, module), attribute))
    return f"{module}.{attribute}"


def is_plain(name: str) -> bool:
    """Whether `name` is among what layers and tensors are made of, such as a dtype."""
    if name in _PLAIN:
        return True
    package, _, attribute = name.rpartition(".")
    if package not in ("torch", "torch.cuda"):
        return False
    return attribute.endswith("Storage") or isinstance(getattr(torch, attribute, 0), torch.dtype)


def is_under(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of `prefixes` or below one."""
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def admit(name: str, path: str, allow: Sequence[str]) -> Any:
    """The Module class, enum or activation called `name`; LoadError where code could run."""

    def refuse(why: str) -> LoadError:
        return load_error(path, f"refused {name}: {why}")

    module, _, attribute = name.rpartition(".")
    if module == "torch.nn.functional" and attribute in _FUNCTIONS:
        return getattr(torch.nn.functional, attribute)
    if not all(part.isidentifier() for part in name.split(".")):
        raise refuse("not the name of a class")
    if not is_under(name, allow):
        if not is_under(name, ADMITTED):
            raise refuse(_why_not_listed(name))
        if not _installed(module):
            raise refuse("a folder of that name hides the installed package; run elsewhere")
    try:
        with import_path("."):
            target = getattr(importlib.import_module(module), attribute)
    except AttributeError as e:
        raise refuse(f"the installed {module} has no such class; name a factory instead") from e
    except (Exception, SystemExit) as e:
        raise refuse(f"importing {module} failed ({describe(e, 120)})") from e
    if why := _why_unfit(target, allow):
        raise refuse(why)
    return target


def check_allowed(allow: Sequence[str]) -> None:
    """LoadError for a package that --allow names and that is not there."""
    for name in allow:
        with import_path("."):
            try:
                found = importlib.util.find_spec(name.partition(".")[0])
            except (ImportError, ValueError):
                found = None
        if found is None:
            raise LoadError(f"--allow {name}: no such package is installed; check its spelling")


def _why_not_listed(name: str) -> str:
    if own := next((why for prefix, why in _OWN_REASONS.items() if is_under(name, [prefix])), ""):
        return own
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root == "torch":
        return "not a layer, and loading it could run code; only --trust would run it"
    ways = f"--allow {root} imports it (which runs its code), --trust runs whatever the file holds"
    return f"{root} is not on the allow-list; {ways}"


def _why_unfit(target: Any, allow: Sequence[str]) -> str:
    """Why an importable object must not be handed to the unpickler; "" if it may."""
    if not isinstance(target, type):
        return f"a {type(target).__name__}, not a torch.nn.Module class; only --trust would run it"
    home = f"{target.__module__}.{target.__qualname__}"
    if not is_under(home, [*ADMITTED, *allow]):
        return f"it is {home}, which is not on the allow-list"
    if {f"{c.__module__}.{c.__qualname__}" for c in target.__mro__} & _CODE_CLASSES:
        return "a class that rebuilds itself by running code; save the eager model"
    if not is_module_class(target) and not isinstance(target, enum.EnumMeta):
        return "a class, but not a torch.nn.Module; only --trust would run it"
    return ""


def is_module_class(target: Any) -> bool:
    """Whether `target` is nn.Module or a class derived from it."""
    return isinstance(target, type) and issubclass(target, nn.Module)


def _installed(module: str) -> bool:
    """Whether a listed package comes from where packages are installed, not from this folder."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return True  # the import itself will say so
    paths = sysconfig.get_paths()
    homes = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    homes += [site.getusersitepackages(), str(Path(torch.__file__).parents[1])]
    origin = Path(spec.origin or ".").resolve()
    return any(Path(home).resolve() in origin.parents for home in homes)
