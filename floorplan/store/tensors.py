"""The tensors of a model as a flat dict and back: kinds, ties and trainability beside it.

    kinds: parameter | buffer | transient (buffer outside the state_dict) | constant (attribute)

Tensors keep dtype, strides and shared storage, because torch.save keeps them. A tensor under two
names is stored once; the later names are `tied` to the first.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, short
from floorplan.layers.layer import Layer
from floorplan.store.graphs import require, safe_path
from floorplan.torch_doors import children_of, has_gradient_hook, parameters_of, tensors_of, transient_of

_KINDS = ("parameter", "buffer", "transient", "constant")


def encode_tensors(gm: fx.GraphModule) -> dict[str, Any]:
    """The entries state, kinds, tied and requires_grad; tensors are shared with `gm`."""
    kinds: dict[str, str] = {}
    first: dict[int, str] = {}
    own: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, kind, tensor in _tensors(gm, _read_by_graph(gm)):
        kinds[name] = kind
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
            continue
        own[name] = tensor
        _refuse(tensor, f"tensor {name}")
    state, trainable = {n: t.detach() for n, t in own.items()}, [n for n, t in own.items() if t.requires_grad]
    return {"state": state, "kinds": kinds, "tied": tied, "requires_grad": trainable}


def _read_by_graph(gm: fx.GraphModule) -> set[int]:
    """Identities of the tensors that get_attr nodes read."""
    found: set[int] = set()
    for node in gm.graph.nodes:
        if node.op != "get_attr" or module_at(gm, str(node.target)) is not None:
            continue  # a layer that is handed to another one; its tensors are the model's own
        value = reduce(getattr, str(node.target).split("."), gm)
        if not isinstance(value, Tensor):
            read = f"reads {node.target}, a {type(value).__name__}"
            raise FloorplanError(f"graph node {node.name}: {read}; adapted.pt holds tensors only")
        found.add(id(value))
    return found


def _tensors(gm: fx.GraphModule, wanted: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    """(name, kind, tensor) of every parameter, buffer and bare tensor that the graph reads."""
    for path, m in gm.named_modules():
        prefix = f"{path}." if path else ""
        yield from ((prefix + name, registered_as(m, name), t) for name, t in tensors_of(m).items() if t is not None)
        for name, value in vars(m).items():
            if isinstance(value, Tensor) and id(value) in wanted:
                yield prefix + name, "constant", value


def registered_as(module: nn.Module, name: str) -> str:
    """parameter, buffer or transient."""
    if name in parameters_of(module):
        return "parameter"
    return "transient" if name in transient_of(module) else "buffer"


def _refuse(t: Tensor, where: str) -> None:
    if not _plain(t) or t.is_meta or not t.is_leaf:
        raise FloorplanError(f"{where}: not a plain dense tensor with data of its own")
    if has_gradient_hook(t):
        raise FloorplanError(f"{where}: has a gradient hook, which is code; remove it first")


def _plain(t: Any) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_quantized


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, found among registered modules only."""
    found: nn.Module | None = root
    for atom in path.split(".") if path else ():
        found = children_of(found).get(atom) if found is not None else None
    return found


def tensor_at(root: nn.Module, path: str) -> Tensor | None:
    """The tensor at a dotted path, found among parameters, buffers and bare tensors only."""
    above, _, name = path.rpartition(".")
    module = module_at(root, above)
    if module is None:
        return None
    value = {**vars(module), **tensors_of(module)}.get(name)
    return value if isinstance(value, Tensor) else None


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and may be given names that no constructor made."""
    return type(module) is nn.Module or isinstance(module, fx.GraphModule)


def decode_tensors(gm: fx.GraphModule, document: dict[str, Any]) -> None:
    """Put the tensors of a document into the modules of `gm`; LoadError if one does not fit."""
    _check_entries(document)
    state, kinds, tied = document["state"], document["kinds"], document["tied"]
    trainable = set(document["requires_grad"])
    made = {name: _revive(t, kinds[name], name in trainable) for name, t in state.items()}
    for name, kind in kinds.items():
        _attach(gm, name, kind, made[tied.get(name, name)])
    for path, t in (*gm.named_parameters(), *gm.named_buffers()):
        require(not t.is_meta, f"tensor {path}: missing from the file")


def _revive(t: Tensor, kind: str, trainable: bool) -> Tensor:
    if kind == "parameter":
        return nn.Parameter(t, requires_grad=trainable)
    return t.detach().requires_grad_() if trainable else t


def _check_entries(document: dict[str, Any]) -> None:
    state, kinds, tied, trainable = (document[k] for k in ("state", "kinds", "tied", "requires_grad"))
    shaped = all(type(d) is dict for d in (state, kinds, tied)) and type(trainable) is list
    require(shaped, "state, kinds, tied, requires_grad: not dicts and a list")
    for name, kind in kinds.items():
        known = safe_path(name) and type(kind) is str and kind in _KINDS
        require(known, f"tensor {short(name)}: name or kind {short(kind)} unknown")
    for name, first in tied.items():
        fits = type(first) is str and first in state and name not in state
        require(fits, f"tensor {short(name)}: tied to {short(first)}")
    require(set(kinds) == {*state, *tied}, "kinds: does not name the tensors of state and tied")
    for name in trainable:
        require(type(name) is str and name in state, f"requires_grad: no tensor {short(name)}")
    for name, t in state.items():
        require(_plain(t) and not t.is_meta and not t.requires_grad, f"tensor {short(name)}: not a plain dense tensor")


def _attach(gm: fx.GraphModule, name: str, kind: str, tensor: Tensor) -> None:
    above, _, last = name.rpartition(".")
    module, parameter = module_at(gm, above), tensor if isinstance(tensor, nn.Parameter) else None
    require(module is not None, f"tensor {name}: no module {short(above)}")
    assert module is not None
    require(kind != "parameter" or parameter is not None, f"tensor {name}: tied to a tensor that is no parameter")
    registered = tensors_of(module)
    if last in registered:
        expected = registered[last]
        known = (
            {registered_as(module, last), "parameter"} if isinstance(module, Layer) else {registered_as(module, last)}
        )
        fits = expected is not None and kind in known and expected.shape == tensor.shape
        require(fits, f"tensor {name}: kind or shape does not fit its module")
        setattr(module, last, tensor)
        return
    require(is_container(module) and not hasattr(module, last), f"tensor {name}: its module has no such {kind}")
    if kind == "parameter":
        module.register_parameter(last, parameter)
    elif kind == "constant":
        setattr(module, last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=kind == "buffer")
