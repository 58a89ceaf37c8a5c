"""Functional ops on the model's own tensors become modules that hold these tensors.

F.conv2d(x, self.conv.weight, self.conv.bias, 1, 1)   ->   Conv2d at path `conv`, same keys
F.linear(x, self.w)                                   ->   Linear at a path named by the node
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.graph.edit import calls_of, free_path
from floorplan.layers.plain import AnyBatchNorm, TrainingFlag
from floorplan.torch_doors import ConvNd, buffers_of, children_of, parameters_of, tensors_of

_STATE = ("weight", "bias", "running_mean", "running_var")
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def adopt(
    gm: fx.GraphModule, node: fx.Node, make: Callable[..., nn.Module], bound: dict[str, Any], training: Any
) -> str:
    """Turn a functional conv, linear, PReLU or BatchNorm into its module; "" or why not."""
    reads = {k: bound.pop(k) for k in _STATE if k in bound}
    x = bound.pop("input")
    for name, source in reads.items():
        if source is not None and not (isinstance(source, fx.Node) and source.op == "get_attr"):
            return f"its {name} is computed in forward"
    bound.pop("training", None)
    for name, value in bound.items():
        computed: list[fx.Node] = []
        fx.node.map_arg(value, computed.append)
        if computed:
            return f"{name} is computed while running ({computed[0].name})"
    tensors = {k: operator.attrgetter(str(n.target))(gm) for k, n in reads.items() if n is not None}
    options = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in bound.items()}
    if make is AnyBatchNorm:
        if why := _unfit(reads, training):
            return why
        module: nn.Module = _norm(gm, x, tensors, options, training)
    else:
        module = _layer(cast(Any, make), tensors, options)
    _hold(module, tensors)
    path = _twin(gm, module) or _home(gm, node, reads, module)
    if path is None:
        path = free_path(gm, node.name)
        gm.add_submodule(path, module)
    before = node.all_input_nodes
    node.op, node.target, node.args, node.kwargs = "call_module", path, (x,), {}
    _forget(gm, [n for n in before if n.op == "get_attr" or n.op == "call_module" and not n.args])
    return ""


def _twin(gm: fx.GraphModule, module: nn.Module) -> str | None:
    """A module that does the same with the same tensors: another call of it, not a second layer."""
    state = [(k, id(t)) for k, t in parameters_of(module).items()]
    for path, m in gm.named_modules():
        if type(m) is type(module) and [(k, id(t)) for k, t in parameters_of(m).items()] == state:
            same = m.training is module.training and repr(m) == repr(module) and state
            if same and buffers_of(m).get("running_mean") is buffers_of(module).get("running_mean"):
                return str(path)
    return None


def _unfit(reads: dict[str, Any], training: Any) -> str:
    """Why a functional BatchNorm has no module; "" if it has."""
    if reads["running_mean"] is None or reads["running_var"] is None:
        return "it has no running statistics"
    if training is None:
        return "training is computed while running"
    if training is True:
        return "it uses the batch's statistics in eval mode too (training=True)"
    if (reads["weight"] is None) is not (reads["bias"] is None):
        return "it has a weight or a bias, but not both"
    return ""


def _layer(cls: type[nn.Module], tensors: dict[str, Tensor], options: dict[str, Any]) -> nn.Module:
    """A conv, linear or PReLU of the weight's shape, without memory of its own."""
    shape, make = tensors["weight"].shape, cast(Any, cls)
    with torch.device("meta"):
        if cls is nn.PReLU:
            return cast(nn.Module, make(shape.numel()))
        if cls is nn.Linear:
            return cast(nn.Module, make(shape[1], shape[0], bias="bias" in tensors))
        groups = options["groups"]
        sides = (shape[1] * groups, shape[0])
        sides = sides[::-1] if "Transpose" in cls.__name__ else sides
        return cast(nn.Module, make(*sides, tuple(shape[2:]), bias="bias" in tensors, **options))


def _norm(gm: fx.GraphModule, x: Any, tensors: dict[str, Tensor], options: dict[str, Any], training: Any) -> nn.Module:
    """The BatchNorm that fits what comes before it, or one that takes any shape."""
    n, affine = tensors["running_mean"].numel(), "weight" in tensors
    if training is False:
        return AnyBatchNorm(n, options["eps"], options["momentum"], affine, fixed=True)
    source = gm.get_submodule(x.target) if x.op == "call_module" else None
    cls: Any = _NORMS[len(source.kernel_size)] if isinstance(source, ConvNd) else AnyBatchNorm
    return cast(nn.Module, cls(n, options["eps"], options["momentum"], affine).train(training.training))


def _hold(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the model's own tensors into a module; a buffer as weight becomes a frozen parameter."""
    for name, t in tensors.items():
        if name in buffers_of(module):
            buffers_of(module)[name] = t
        else:
            parameters_of(module)[name] = t if isinstance(t, nn.Parameter) else nn.Parameter(t, requires_grad=False)
    if (like := tensors.get("running_mean")) is not None:
        module.num_batches_tracked = cast(Tensor, module.num_batches_tracked).to(like.device)


def _home(gm: fx.GraphModule, node: fx.Node, reads: dict[str, Any], module: nn.Module) -> str | None:
    """Where the module can take the place of a container that held just its tensors."""
    paths = {k: str(n.target) for k, n in reads.items() if n is not None}
    owners = {p.rpartition(".")[0] for p in paths.values()}
    if owners == {""} or len(owners) > 1:
        return None
    owner = owners.pop()
    old = gm.get_submodule(owner)
    inside, own = tensors_of(old), tensors_of(module)
    flags = [f"{owner}.{k}" for k, m in children_of(old).items() if isinstance(m, TrainingFlag)]
    free = all(set(n.users) == {node} for f in flags for n in calls_of(gm, f))
    fits = type(old) is nn.Module and len(flags) == len(children_of(old)) and free
    if not fits or not set(inside) <= set(own) or any(p.rpartition(".")[2] != k for k, p in paths.items()):
        return None
    if "num_batches_tracked" in inside:
        buffers_of(module)["num_batches_tracked"] = cast(Tensor, inside["num_batches_tracked"])
    parent, _, name = owner.rpartition(".")
    setattr(gm.get_submodule(parent), name, module)
    return owner


def _forget(gm: fx.GraphModule, inputs: list[fx.Node]) -> None:
    """Drop parameter and flag reads that nobody needs, and the attributes that only they used."""
    for node in inputs:
        if node.users:
            continue
        path = str(node.target)
        was_read = node.op == "get_attr"
        gm.graph.erase_node(node)
        if not was_read or any(n.op == "get_attr" and n.target == path for n in gm.graph.nodes):
            continue
        owner, _, name = path.rpartition(".")
        if not calls_of(gm, owner):
            delattr(gm.get_submodule(owner), name)
