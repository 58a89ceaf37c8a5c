"""An fx graph as plain data and back.

    relu = torch.relu(x)   <->   {"op": "call_function", "name": "relu", "target": "torch.relu",
                                  "args": [{"node": "x"}], "kwargs": {}}

fx turns names, keyword names and targets into source text, so decoding checks each of them. Lists
stay lists; every other container and constant is a dict with one key, its tag.
"""

import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from floorplan.errors import FloorplanError, LoadError, short
from floorplan.layers.records import record_name, record_named
from floorplan.layers.targets import ATTRIBUTES, function_named, methods, name_of
from floorplan.torch_doors import calls_plainly

_SCALARS = (type(None), bool, int, float, str)
_DEPTH = 32  # nesting of one value
_BUDGET = 4_000_000  # values in one file: lists that hold one another many times stay bounded

# Names that fx's generated source gives a meaning of its own.
_RESERVED = frozenset(("torch", "self", "inf", "nan", "NoneType", "device", "fx_pytree", "pytree"))
_ATOM = re.compile(r"[\w\- /:+]+", re.ASCII)  # Python would fold other letters into these


_CONSTANTS: dict[str, dict[str, Any]] = {
    kind.__name__: {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}
    for kind in (torch.dtype, torch.memory_format, torch.layout)
}


def require(ok: object, said: str) -> None:
    """LoadError, where a file that may be hostile does not hold what it must."""
    if not ok:
        raise LoadError(f"{said}; refused")


def identifier(text: Any) -> bool:
    """Whether fx may write `text` as a name: ASCII, no keyword, no dunder."""
    plain = isinstance(text, str) and text.isascii() and text.isidentifier()
    return plain and not (keyword.iskeyword(text) or text.startswith("__") or text in _RESERVED)


def safe_path(text: object) -> bool:
    """Whether `text` is a dotted module path without dunders and without quotes."""
    if not isinstance(text, str):
        return False
    return all(_ATOM.fullmatch(a) and not a.startswith("__") for a in text.split("."))


def encode_value(value: Any, where: str) -> Any:
    """A graph argument as plain data; FloorplanError names the type that is not data."""
    kind = type(value)

    def each(values: Iterable[Any]) -> list[Any]:
        return [encode_value(v, where) for v in values]

    if kind in _SCALARS:
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        fields = record_name(kind)
        return {"record": [fields, each(value)]} if fields else {"size" if kind is torch.Size else "tuple": each(value)}
    if isinstance(value, list):
        return each(value)
    if isinstance(value, dict) and kind.__name__ in ("dict", "immutable_dict"):
        return {"dict": [each(pair) for pair in value.items()]}
    if isinstance(value, slice):
        return {"slice": each((value.start, value.stop, value.step))}
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
            return self.items(data, where, depth + 1)
        require(type(data) is dict and len(data) == 1, f"{where}: {short(data)} is not an encoded value")
        ((tag, body),) = data.items()
        return self._tagged(tag, body, where, depth + 1)

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

    def items(self, body: Any, where: str, depth: int = 0, length: int | None = None) -> list[Any]:
        """The decoded members of a list, of a given length if any."""
        fits = type(body) is list and length in (None, len(body))
        require(fits, f"{where}: {short(body)} is not a list of the right length")
        return [self.value(v, where, depth) for v in body]

    def _tagged(self, tag: Any, body: Any, where: str, depth: int) -> Any:
        text = body if type(body) is str else None
        match tag:
            case "node":
                require(text in self.nodes, f"{where}: uses {short(body)}, which no earlier node defines")
                return self.nodes[body]
            case "tuple":
                return tuple(self.items(body, where, depth))
            case "record":
                kind, values = self.items(body, where, depth, 2)
                require(type(kind) is str and type(values) is list, f"{where}: {short(body)} is not a container")
                made = record_named(kind, where)
                fits = made is not None and issubclass(made, tuple) and len(values) == len(made.__match_args__)
                require(fits, f"{where}: {short(kind)} is not a tuple of these fields")
                return made(*values)
            case "slice":
                return slice(*self.items(body, where, depth, 3))
            case "ellipsis":
                return ...
            case "size":
                sizes = self.items(body, where, depth)
                require(all(type(v) is int for v in sizes), f"{where}: a size holds something that is not an integer")
                return torch.Size(sizes)
            case "dict":
                require(type(body) is list, f"{where}: {short(body)} is not a list of pairs")
                pairs = [self.items(pair, where, depth + 1, 2) for pair in body]
                require(all(type(k) in _SCALARS for k, _ in pairs), f"{where}: a dict key is not a number or text")
                return dict(pairs)
            case "device":
                require(text and re.fullmatch(r"[a-z]+(:\d{1,4})?", text), f"{where}: {short(body)} is not a device")
                try:
                    return torch.device(body)
                except RuntimeError as e:
                    raise LoadError(f"{where}: this torch knows no device {short(body)}; refused") from e
        require(tag in _CONSTANTS, f"{where}: a dict is not an encoded value")
        require(text in _CONSTANTS[tag], f"{where}: this torch knows no {tag} {short(body)}")
        return _CONSTANTS[tag][body]

    def _count(self, where: str, depth: int) -> None:
        self.left -= 1
        if depth > _DEPTH or self.left < 0:
            raise LoadError(f"{where}: nested too deep or too large; refused")


def encode_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """One record a node, in order; FloorplanError for a graph that is not data."""
    if not calls_plainly(graph):
        way = "re-trace it with torch.fx.symbolic_trace first"
        raise FloorplanError(f"graph: has its own calling convention (torch.export); {way}")
    records = []
    for n in graph.nodes:
        where = f"graph node {n.name}"
        target = n.target if isinstance(n.target, str) else name_of(n.target, where)
        args = [encode_value(a, where) for a in n.args]
        kwargs = {k: encode_value(v, where) for k, v in n.kwargs.items()}
        if fault := _fault(n.op, target, n.args, n.kwargs):
            raise FloorplanError(f"{where}: {fault}; refused")
        records.append({"op": n.op, "name": n.name, "target": target, "args": args, "kwargs": kwargs})
    return records


def _fault(op: str, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What of a node's names, keyword names and attribute reads tracing does not produce; "" for nothing."""
    if bad := [k for k in kwargs if not identifier(k) and k != "device"]:
        return f"{short(bad[0])} is not a keyword name"
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
            ok, what = False, f"op {short(op)} with"
    return "" if ok else f"{what} {short(target)} is not on the allow-list"


def decode_graph(records: Any, reader: Reader) -> fx.Graph:
    """The graph of a list of records; LoadError names the first one that may not be."""
    require(type(records) is list and records, "graph: not a list of nodes")
    graph = fx.Graph()
    for i, record in enumerate(records):
        where = f"graph node {i}"
        known = type(record) is dict and set(record) == {"op", "name", "target", "args", "kwargs"}
        require(known, f"{where}: keys are not op, name, target, args, kwargs")
        name, op, target = record["name"], record["op"], record["target"]
        named = identifier(name) and type(op) is str and type(target) is str
        require(named, f"{where}: op, name or target {short(name)} is not a name")
        where = f"graph node {name}"
        args = tuple(reader.items(record["args"], where))
        require(type(record["kwargs"]) is dict, f"{where}: kwargs is not a dict")
        kwargs = {k: reader.value(v, where) for k, v in record["kwargs"].items()}
        fault = _fault(op, target, args, kwargs)
        require(not fault, f"{where}: {fault}")
        require((op == "output") == (i == len(records) - 1), f"{where}: output is not the last node")
        callee = function_named(target, where) if op == "call_function" else target
        node = graph.create_node(op, callee, args, kwargs, name=name)
        require(node.name == name, f"{where}: the name is taken or reserved")
        reader.nodes[name] = node
    return graph
