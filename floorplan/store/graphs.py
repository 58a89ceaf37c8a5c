"""An fx graph as plain data and back.

    relu = torch.relu(x)   <->   {"op": "call_function", "name": "relu", "target": "torch.relu",
                                  "args": [{"node": "x"}], "kwargs": {}}

fx turns names, keyword names and targets into source text, so decoding checks each of them. Lists
stay lists; every other container and constant is a dict with one key, its tag.
"""

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from floorplan.errors import FloorplanError, LoadError
from floorplan.layers.targets import ATTRIBUTES, function_named, methods, name_of
from floorplan.text import short
from floorplan.torch_doors import calls_plainly

_SCALARS = (type(None), bool, int, float, str)
_DEPTH = 32  # nesting of one value
_BUDGET = 4_000_000  # values in one file: lists that hold one another many times stay bounded

# Names that fx's generated source gives a meaning of its own.
_RESERVED = frozenset(("torch", "self", "inf", "nan", "NoneType", "device", "fx_pytree", "pytree"))
_ATOM = re.compile(r"[\w\- /:+]+", re.ASCII)  # Python would fold other letters into these


def _constants(kind: type) -> dict[str, Any]:
    found = (v for v in vars(torch).values() if isinstance(v, kind))
    return {str(v).removeprefix("torch."): v for v in found}


_CONSTANTS: dict[str, dict[str, Any]] = {
    "dtype": _constants(torch.dtype),
    "memory_format": _constants(torch.memory_format),
    "layout": _constants(torch.layout),
}


def identifier(text: object) -> bool:
    """Whether fx may write `text` as a name: ASCII, no keyword, no dunder."""
    return (
        isinstance(text, str)
        and text.isascii()
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and not text.startswith("__")
        and text not in _RESERVED
    )


def safe_path(text: object) -> bool:
    """Whether `text` is a dotted module path without dunders and without quotes."""
    if not isinstance(text, str):
        return False
    return all(_ATOM.fullmatch(a) and not a.startswith("__") for a in text.split("."))


def encode_value(value: Any, where: str) -> Any:
    """A graph argument as plain data; FloorplanError names the type that is not data."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if kind is torch.Size:
        return {"size": [encode_value(v, where) for v in value]}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encode_value(v, where) for v in value]}
    if isinstance(value, list):
        return [encode_value(v, where) for v in value]
    if isinstance(value, dict) and kind.__name__ in ("dict", "immutable_dict"):
        return {"dict": [[encode_value(k, where), encode_value(v, where)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode_value(v, where) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return {kind.__name__: str(value).removeprefix("torch.")}
    raise FloorplanError(
        f"{where}: a {kind.__module__}.{kind.__qualname__} is not plain data; adapted.pt holds"
        " numbers, text, tuples, lists, dicts, slices and torch dtypes, devices and layouts"
    )


@dataclass
class Reader:
    """Decodes values of one document, within a bound on how many there may be."""

    allow: Sequence[str] = ()  # packages from outside whose module classes the document may name
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    left: int = _BUDGET

    def value(self, data: Any, where: str, depth: int = 0) -> Any:
        """The value that `encode_value` stored; LoadError for anything else."""
        self._count(where, depth)
        if type(data) in _SCALARS:
            return data
        if type(data) is list:
            return [self.value(v, where, depth + 1) for v in data]
        if type(data) is dict and len(data) == 1:
            tag, body = next(iter(data.items()))
            if type(tag) is str and tag in _TAGS:
                return _TAGS[tag](self, body, where, depth + 1)
        raise LoadError(f"{where}: {short(data)} is not an encoded value; refused")

    def json(self, data: Any, where: str, depth: int = 0) -> Any:
        """A copy of JSON-like data (dict with text keys, list, scalar); LoadError otherwise."""
        self._count(where, depth)
        if type(data) in _SCALARS:
            return data
        if type(data) is list:
            return [self.json(v, where, depth + 1) for v in data]
        if type(data) is dict and all(type(k) is str for k in data):
            return {k: self.json(v, where, depth + 1) for k, v in data.items()}
        raise LoadError(f"{where}: a {type(data).__name__} is not JSON data; refused")

    def items(self, body: Any, where: str, depth: int, length: int | None = None) -> list[Any]:
        """The decoded members of a list, of a given length if any."""
        if type(body) is not list or length not in (None, len(body)):
            raise LoadError(f"{where}: {short(body)} is not a list of the right length; refused")
        return [self.value(v, where, depth) for v in body]

    def _count(self, where: str, depth: int) -> None:
        self.left -= 1
        if depth > _DEPTH or self.left < 0:
            raise LoadError(f"{where}: nested too deep or too large; refused")


def _node(r: Reader, body: Any, where: str, depth: int) -> fx.Node:
    if type(body) is not str or body not in r.nodes:
        raise LoadError(f"{where}: uses {short(body)}, which no earlier node defines; refused")
    return r.nodes[body]


def _dict(r: Reader, body: Any, where: str, depth: int) -> dict[Any, Any]:
    if type(body) is not list:
        raise LoadError(f"{where}: {short(body)} is not a list of pairs; refused")
    pairs = [r.items(pair, where, depth + 1, 2) for pair in body]
    if any(type(k) not in _SCALARS for k, _ in pairs):
        raise LoadError(f"{where}: a dict key is not a number or text; refused")
    return dict(pairs)


def _size(r: Reader, body: Any, where: str, depth: int) -> torch.Size:
    items = r.items(body, where, depth)
    if any(type(v) is not int for v in items):
        raise LoadError(f"{where}: a size holds something that is not an integer; refused")
    return torch.Size(items)


def _device(r: Reader, body: Any, where: str, depth: int) -> torch.device:
    if type(body) is not str or not re.fullmatch(r"[a-z]+(:\d{1,4})?", body):
        raise LoadError(f"{where}: {short(body)} is not a device; refused")
    try:
        return torch.device(body)
    except RuntimeError as e:
        raise LoadError(f"{where}: this torch knows no device {short(body)}; refused") from e


def _ellipsis(r: Reader, body: Any, where: str, depth: int) -> Any:
    return ...


def _constant(tag: str) -> Callable[[Reader, Any, str, int], Any]:
    def read(r: Reader, body: Any, where: str, depth: int) -> Any:
        if type(body) is not str or body not in _CONSTANTS[tag]:
            raise LoadError(f"{where}: this torch knows no {tag} {short(body)}; refused")
        return _CONSTANTS[tag][body]

    return read


_TAGS: dict[str, Callable[[Reader, Any, str, int], Any]] = {
    "node": _node,
    "size": _size,
    "tuple": lambda r, body, where, depth: tuple(r.items(body, where, depth)),
    "dict": _dict,
    "slice": lambda r, body, where, depth: slice(*r.items(body, where, depth, 3)),
    "ellipsis": _ellipsis,
    "device": _device,
    **{tag: _constant(tag) for tag in _CONSTANTS},
}


def encode_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """One record a node, in order; FloorplanError for a graph that is not data."""
    if not calls_plainly(graph):
        raise FloorplanError(
            "graph: has its own calling convention (torch.export); re-trace it with torch.fx.symbolic_trace first"
        )
    records = []
    for n in graph.nodes:
        where = f"graph node {n.name}"
        target = n.target if isinstance(n.target, str) else name_of(n.target, where)
        record = {
            "op": n.op,
            "name": n.name,
            "target": target,
            "args": [encode_value(a, where) for a in n.args],
            "kwargs": {k: encode_value(v, where) for k, v in n.kwargs.items()},
        }
        _check_call(n.op, target, n.args, n.kwargs, where, FloorplanError)
        records.append(record)
    return records


def _check_call(
    op: str, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, error: type[FloorplanError]
) -> None:
    """Refuse names, keyword names and attribute reads that are not what tracing produces."""
    bad = [k for k in kwargs if not identifier(k) and k != "device"]
    if bad:
        raise error(f"{where}: {short(bad[0])} is not a keyword name; refused")
    ok, what = True, "target"
    match op:
        case "placeholder":
            bare = target[2:] if target.startswith("**") else target.removeprefix("*")
            ok = identifier(bare) and len(args) <= 1 and not kwargs
        case "call_method":
            ok = target in methods() and len(args) > 0
        case "call_module":
            ok = safe_path(target)
        case "get_attr":
            ok = safe_path(target) and not args and not kwargs
        case "output":
            ok = target == "output" and len(args) == 1 and not kwargs
        case "call_function" if target == "builtins.getattr":
            what = f"attribute {short(args[1])} of" if len(args) == 2 else "the arguments of"
            ok = len(args) == 2 and not kwargs and isinstance(args[0], fx.Node)
            ok = ok and type(args[1]) is str and args[1] in ATTRIBUTES
        case "call_function":
            pass
        case _:
            what = f"op {short(op)} with"
            ok = False
    if not ok:
        raise error(f"{where}: {what} {short(target)} is not on the allow-list; refused")


def decode_graph(records: Any, reader: Reader) -> fx.Graph:
    """The graph of a list of records; LoadError names the first one that may not be."""
    if type(records) is not list or not records:
        raise LoadError("graph: not a list of nodes; refused")
    graph = fx.Graph()
    for i, record in enumerate(records):
        where = f"graph node {i}"
        if type(record) is not dict or set(record) != {"op", "name", "target", "args", "kwargs"}:
            raise LoadError(f"{where}: keys are not op, name, target, args, kwargs; refused")
        name, op, target = record["name"], record["op"], record["target"]
        if not identifier(name) or type(op) is not str or type(target) is not str:
            raise LoadError(f"{where}: op, name or target {short(name)} is not a name; refused")
        where = f"graph node {name}"
        args = tuple(reader.items(record["args"], where, 0))
        if type(record["kwargs"]) is not dict:
            raise LoadError(f"{where}: kwargs is not a dict; refused")
        kwargs = {k: reader.value(v, where) for k, v in record["kwargs"].items()}
        _check_call(op, target, args, kwargs, where, LoadError)
        if (op == "output") != (i == len(records) - 1):
            raise LoadError(f"{where}: output is not the last node; refused")
        callee = function_named(target, where) if op == "call_function" else target
        node = graph.create_node(op, callee, args, kwargs, name=name)
        if node.name != name:
            raise LoadError(f"{where}: the name is taken or reserved; refused")
        reader.nodes[name] = node
    return graph
