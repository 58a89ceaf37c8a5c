"""Functions that a graph calls as they are, since their own code cannot be traced through.

torch.zeros(x.shape[0], 3)   ->   zeros((getitem, 3))     torch takes no traced number beside others
roi_align(x, boxes, 7)       ->   roi_align(x, boxes, 7)  its checks ask for tensors
len(x)                       ->   x.size(0)               Python's own must give a number
"""

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from floorplan.layers.targets import leaf_functions
from floorplan.torch_doors import tree_leaves

_SIZED = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)  # take sizes one by one, too
_COUNTED = (torch.randperm, torch.randint)
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_NOT_OWN = {"torch", "builtins", "floorplan", *sys.stdlib_module_names} - {"__main__"}
Record = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _users(name: str, space: dict[str, Any], packages: set[str]) -> bool:
    top, file = name.partition(".")[0], space.get("__file__")
    return top not in _NOT_OWN and (top in packages or not str(file or _INSTALLED[0]).startswith(_INSTALLED))


@contextmanager
def recording(model: nn.Module, record: Record, length: Callable[[Any], Any]) -> Iterator[None]:
    """record(function, args, kwargs) is asked in place of these functions where they are given what is traced.

    `length` is what the packages that define the model's classes, and all that is not installed, call for len.
    """

    def instead(f: Callable[..., Any], packed: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(v, fx.Proxy) for v in tree_leaves((args, kwargs))):
                return f(*args, **kwargs)
            return record(f, (args,) if packed and len(args) > 1 else args, kwargs)

        return call

    functions: list[Callable[..., Any]] = [*_SIZED, *_COUNTED, *leaf_functions()]
    taken = {id(f): instead(f, f in _SIZED) for f in functions}
    packages = {c.__module__.partition(".")[0] for m in model.modules() for c in type(m).__mro__}
    loaded = {n: vars(m) for n, m in list(sys.modules.items()) if m is not None and not n.startswith("torch.")}
    spaces = list(loaded.values())
    asked = [space for n, space in loaded.items() if _users(n, space, packages) and "len" not in space]
    for space in asked:
        space["len"] = length
    try:
        with _rebound(spaces, taken):
            yield
    finally:
        for space in asked:
            space.pop("len", None)  # a module may be known by two names


@contextmanager
def _rebound(spaces: Iterable[dict[str, Any]], new: Mapping[int, Any]) -> Iterator[None]:
    """Names in these namespaces that stand for an object of one of these ids stand for another meanwhile."""
    found = [(space, k, v) for space in spaces for k, v in space.items() if id(v) in new]
    for space, k, v in found:
        space[k] = new[id(v)]
    try:
        yield
    finally:
        for space, k, v in found:
            space[k] = v
