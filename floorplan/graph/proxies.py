"""fx proxies that can be asked about sizes, and that keep in-place syntax in place."""

import operator
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx

from floorplan.graph.leaves import Refusal
from floorplan.torch_doors import PROXY_FIELDS


class _Asks:
    """What tracing adds to an fx proxy: questions about sizes, and in-place syntax."""

    def __getattr__(self, k: str) -> "Attribute":
        return Attribute(cast(fx.Proxy, self), k)

    def __setattr__(self, k: str, v: Any) -> None:
        if k not in PROXY_FIELDS:
            raise Refusal(f"sets the attribute `{k}` of a tensor")
        object.__setattr__(self, k, v)

    def __setitem__(self, key: Any, value: Any) -> None:
        cast(Any, self).tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        return cast(int, cast(Any, self).tracer.length(self))


def _number(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: self.tracer.number(self, kind)


def _inplace(name: str) -> Callable[[Any, Any], Any]:
    target = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


for _name in "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split():
    setattr(_Asks, f"__{_name}__", _inplace(_name))
for _name, _kind in (("int", int), ("float", float), ("index", operator.index)):
    setattr(_Asks, f"__{_name}__", _number(_kind))


class Proxy(_Asks, fx.Proxy):
    """A traced value; hasattr() is answered by what it stands for."""

    def __getattr__(self, k: str) -> "Attribute":
        tracer = cast(Any, self).tracer
        usual = k.startswith("__") or hasattr(Tensor, k)
        if not usual and not tracer.evaluator.running and tracer.lacks(self, k):
            raise AttributeError(f"'Tensor' object has no attribute '{k}'")
        return Attribute(self, k)


class Attribute(_Asks, fx.proxy.Attribute):
    """An attribute of a traced value; a node only once it is used."""
