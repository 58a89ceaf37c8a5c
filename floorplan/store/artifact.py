"""adapted.pt: a rewritten model as data that `torch.load(weights_only=True)` reads.

    {"format": "floorplan.adapted/1",
     "graph":   [{op, name, target, args, kwargs}, ...]      targets from an allow-list
     "modules": [{path, class, config, training[, shared_with]}, ...]
     "state":   {name: tensor},   "kinds": {name: parameter | buffer | transient | constant}
     "tied":    {name: first name of the same tensor},   "requires_grad": [names],   "meta": plan}

No code is stored and none runs on loading: the file is taken to be hostile, and what is not on a
list is refused. A `transient` is a buffer outside the state_dict, a `constant` a bare tensor.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from floorplan.errors import FloorplanError, LoadError, first_line, short
from floorplan.files import whole
from floorplan.store.admit import check_allowed
from floorplan.store.graphs import Reader, decode_graph, encode_graph, require, safe_path
from floorplan.store.modules import build, class_name, encode_module, packages_of, refuse_code
from floorplan.store.recognize import damaged_record
from floorplan.store.tensors import decode_tensors, encode_tensors, is_container, module_at, tensor_at

FORMAT = "floorplan.adapted/1"
_KEYS = {"format", "graph", "modules", "state", "kinds", "tied", "requires_grad", "meta"}
_RECORD = {"path", "class", "config", "training"}
_CONTAINER = "Module"  # a plain nn.Module that only holds others
_PART = "part"  # made by the constructor of the module above it


def save_artifact(
    gm: fx.GraphModule, path: str | Path, meta: Mapping[str, Any], *, force: bool = False, allow: Sequence[str] = ()
) -> None:
    """Write `gm` and the plan `meta` (JSON-able) to `path`, all of it or nothing.

    allow: packages whose module classes may be named; a Layer from outside always is.
    Raises FloorplanError for a model that is not data, or a file that is there (unless `force`).
    """
    path = Path(path)
    if path.exists() and not force:
        raise FloorplanError(f"{path}: already exists; choose another name or force overwriting")
    document = encode(gm, allow)
    try:
        document["meta"] = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as e:
        raise FloorplanError(f"{path}: the plan is not JSON data: {first_line(e)}") from e
    try:
        decode(document, (*allow, *packages_of(gm)))
    except LoadError as e:
        raise FloorplanError(f"{path}: not written, it would not load again: {e}") from e
    try:
        with whole(path) as draft, draft.open("xb") as file:
            torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as e:
        raise FloorplanError(f"{path}: cannot be written: {first_line(e)}") from e


def load_artifact(
    path: str | Path, map_location: torch.device | str | None = None, allow: Sequence[str] = ()
) -> fx.GraphModule:
    """The trainable model of an adapted.pt; its plan is in `.meta["floorplan"]`.

    Tensors go to `map_location`; by default to where they were saved from, or to the CPU where
    there is no accelerator. allow: packages from outside whose layers it may name. LoadError if it is refused.
    """
    check_allowed(allow)
    if map_location is None and not torch.accelerator.is_available():
        map_location = "cpu"
    try:
        document = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as e:
        known = "Weights only load failed" in str(e) or "weights_only" in str(e)
        reason = "it holds more than plain data" if known else first_line(e)
        way = "floorplan.load reads what floorplan.save or rewrite wrote"
        raise LoadError(f"{path}: not an adapted.pt: {reason}; {way}") from e
    try:
        if bad := damaged_record(path):
            raise LoadError(f"damaged: {bad} does not match its checksum; write the file again")
        return decode(document, allow)
    except LoadError as e:
        raise LoadError(f"{path}: {e}") from e


def encode(gm: fx.GraphModule, allow: Sequence[str] = ()) -> dict[str, Any]:
    """The document of a model, sharing its tensors, with empty `meta`; may raise FloorplanError."""
    graph = encode_graph(gm.graph)
    called = {str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    modules = list(_module_records(gm, called, allow))
    return {"format": FORMAT, "graph": graph, "modules": modules, **encode_tensors(gm), "meta": {}}


def _module_records(gm: fx.GraphModule, called: set[str], allow: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One record a path, parents first; what is below a shared module stands at its first path."""
    first: dict[int, str] = {}
    leaves: set[str] = set()
    shared: set[str] = set()
    for path, m in gm.named_modules(remove_duplicate=False):
        above = {path[:i] for i, c in enumerate(path) if c == "."}
        if above & shared:
            continue
        record = {"path": path, "class": _CONTAINER, "config": {}, "training": m.training}
        where = f"module {path or '(the whole model)'}"
        if above & leaves:
            record["class"] = _PART
        elif id(m) in first:
            record["shared_with"] = first[id(m)]
            shared.add(path)
        elif path and (path in called or (not is_container(m) and class_name(m) is not None)):
            record["class"], record["config"] = encode_module(m, where, allow)
            leaves.add(path)
        else:
            refuse_code(m, where)
        first.setdefault(id(m), path)
        yield record


def decode(document: Any, allow: Sequence[str] = ()) -> fx.GraphModule:
    """The trainable model of a document, sharing its tensors; LoadError names what is refused."""
    try:
        return _decode(document, Reader(allow))
    except LoadError:
        raise
    except Exception as e:
        raise LoadError(f"damaged: {type(e).__name__}: {first_line(e)}") from e


def _decode(document: Any, reader: Reader) -> fx.GraphModule:
    if type(document) is not dict or document.get("format") != FORMAT:
        raise LoadError(f"not a {FORMAT} document; write it with `floorplan rewrite`")
    odd = sorted(str(k) for k in set(document) ^ _KEYS)
    require(not odd, f"unknown or missing entry {short(next(iter(odd), ''))}")
    meta = reader.json(document["meta"], "meta")
    require(type(meta) is dict, "meta: not a dict")
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    _add_modules(gm, document["modules"], reader)
    decode_tensors(gm, document)
    graph = decode_graph(document["graph"], reader)
    for node in graph.nodes:
        _check_path(gm, node)
    gm.graph = graph
    graph.lint()
    gm.meta["floorplan"] = meta
    return gm


def _check_path(gm: fx.GraphModule, node: fx.Node) -> None:
    """LoadError unless a node's module or tensor is there; a layer may be handed to another one, as remat does."""
    where, path = f"graph node {node.name}", str(node.target)
    module = module_at(gm, path)
    layer = module is not None and not is_container(module)
    if node.op == "call_module":
        require(layer, f"{where}: the file has no module {short(path)} to call")
    if node.op == "get_attr":
        require(layer or tensor_at(gm, path) is not None, f"{where}: the file has no tensor {short(path)}")


def _add_modules(gm: fx.GraphModule, records: Any, reader: Reader) -> None:
    """Build the module tree of `gm` from its records; the first one is `gm` itself."""
    require(type(records) is list and records, "modules: not a list of modules")
    for i, record in enumerate(records):
        known = type(record) is dict and set(record) - {"shared_with"} == _RECORD
        require(known, f"module {i}: keys are not {', '.join(sorted(_RECORD))}")
        path, config = record["path"], record["config"]
        where = f"module {short(path)}"
        texts = type(record["class"]) is str and (safe_path(path) if i else path == "")
        fields = type(config) is dict and all(type(k) is str for k in config) and type(record["training"]) is bool
        require(texts and fields, f"{where}: path, class, config or training is malformed")
        if i:
            _add_module(gm, record, reader, where)
        else:
            gm.training = record["training"]


def _add_module(gm: fx.GraphModule, record: dict[str, Any], reader: Reader, where: str) -> None:
    above, _, name = record["path"].rpartition(".")
    parent, old = module_at(gm, above), module_at(gm, record["path"])
    if record["class"] == _PART and old is not None:
        old.training = record["training"]
        return
    if parent is None or not is_container(parent) or hasattr(parent, name):
        raise LoadError(f"{where}: its place is taken or does not exist; refused")
    if "shared_with" in record:
        module = _shared(gm, record["shared_with"], parent, where)
    elif record["class"] == _CONTAINER:
        module = nn.Module()
    else:
        module = build(record["class"], record["config"], reader, where)
    module.training = record["training"]
    parent.register_module(name, module)


def _shared(gm: fx.GraphModule, path: Any, parent: nn.Module, where: str) -> nn.Module:
    module = module_at(gm, path) if safe_path(path) else None
    if module is None or any(m is parent for m in module.modules()):
        raise LoadError(f"{where}: cannot be shared with {short(path)}; refused")
    return module
