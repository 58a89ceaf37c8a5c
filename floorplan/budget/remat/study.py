"""A graph's values as rematerialisation sees them.

The graph runs once on fake tensors, and the dispatcher is asked, node by node: what memory was made, what was
saved, what was written to, were random numbers drawn, how many operations did it take.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from floorplan import torch_doors as doors
from floorplan.graph.copies import clone_structure
from floorplan.layers.layer import Layer, model_state
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.kernels import as_really_run, quiet_fakes
from floorplan.ledger.recurrent import fused_lstm
from floorplan.torch_doors import storage_key, tensors_in

_STATISTICS = "batch_norm"  # native, cudnn and miopen kernels write running statistics and do not say so


@dataclass
class Value:
    """What one node makes."""

    node: str
    refused: str = ""  # why it cannot be computed again
    tensor: bool = False  # it is one tensor
    owner: str = ""  # the node whose memory it is: itself, or what it is a view of
    nbytes: int = 0  # of that memory, if it is its own
    cost: int = 0  # multiply-adds and elements of one computation
    macs: int = 0
    written: str = ""  # a later node that overwrites it
    saves: list[str] = field(default_factory=list)  # owners whose memory it keeps for its backward


class _Ops(doors.TorchDispatchMode):
    """What the ops of one node do besides returning results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused, self.written, self.born = "", set[int](), set[int]()
        self.alive: list[Any] = []  # storages, so that no key of theirs is used twice: tensors may change theirs

    def hold(self, tensors: Iterable[Tensor]) -> None:
        self.alive += [t.untyped_storage() for t in tensors]

    def start(self) -> None:
        self.refused, self.written, self.born = "", set(), set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = doors.schema_of(func)
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        given = {storage_key(t) for t in doors.tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = as_really_run(func, args, kwargs)
        made = [t for t in doors.tree_iter(out) if isinstance(t, Tensor)]
        self.born |= {storage_key(t) for t in made} - given
        self.hold(made)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refused = "it draws random numbers"
        if _STATISTICS in schema.name and (named.get("training") or named.get("train")):
            if named.get("running_mean") is not None:
                self.refused = "it updates running statistics"
        for a in schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write and a.name in named:
                self.written |= {storage_key(t) for t in doors.tree_iter(named[a.name]) if isinstance(t, Tensor)}
        return out


class _Study(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, ops: _Ops, inputs: Sequence[Any]) -> None:
        super().__init__(gm)
        self.extra_traceback, self.garbage_collect_values, self.ops = False, False, ops
        self.values: dict[str, Value] = {}
        given = (*model_state(gm), *tensors_in(tuple(inputs)))
        ops.hold(given)
        self.owners: dict[int, str] = {storage_key(t): "" for t in given}
        self.apart = set(self.owners)

    def run_node(self, n: fx.Node) -> Any:
        saved: list[Tensor] = []
        self.ops.start()

        def pack(t: Tensor) -> Tensor:
            saved.append(t.detach())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = super().run_node(n)
        v = self.values[n.name] = Value(n.name, refused=self.ops.refused or _untrusted(n, self.module))
        foreign = self.ops.written - self.ops.born
        if foreign:
            v.refused = v.refused or "it writes to memory that it did not make"
            for owner in filter(None, (self.owners.get(key) for key in foreign)):
                self.values[owner].written = self.values[owner].written or n.name
        self._own(v, n, out)
        v.cost = sum(t.numel() for t in tensors_in(out) if storage_key(t) in self.ops.born)
        self.ops.hold(saved)
        v.saves = list(dict.fromkeys(self.owners.get(storage_key(t), "") for t in saved))
        if n.op.startswith("call_") and not v.refused:
            v.macs = self._macs(n)
            v.cost += v.macs
        return out

    def _macs(self, n: fx.Node) -> int:
        """Multiply-adds of the call when nothing is to be differentiated, as it is computed again."""
        given = self.fetch_args_kwargs_from_env(n)
        args, kwargs = doors.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, given)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            getattr(self, n.op)(n.target, args, kwargs)
        return int(counter.get_total_flops()) // 2

    def _own(self, v: Value, n: fx.Node, out: Any) -> None:
        if not isinstance(out, Tensor) or n.op == "output":
            return
        v.tensor, key = True, storage_key(out)
        if n.op == "placeholder":
            self.owners[key] = v.owner = n.name
        elif key not in self.owners:
            self.owners[key] = v.owner = n.name
            v.nbytes = out.untyped_storage().nbytes()
        else:
            v.owner = self.owners[key]
        self.ops.hold([out])


def _untrusted(n: fx.Node, gm: nn.Module) -> str:
    """Why a layer of unknown code is not run twice."""
    if n.op != "call_module":
        return ""
    m = gm.get_submodule(str(n.target))
    return "" if _known(m) else f"nothing is known of what {type(m).__name__} does when it runs twice"


def _known(m: nn.Module) -> bool:
    return isinstance(m, Layer) or type(m).__module__.startswith("torch.")


_INPLACE = ("add", "sub", "mul", "truediv")
_OUT_OF_PLACE: dict[Any, Any] = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _INPLACE}


def out_of_place(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, dict[str, Value]]:
    """A copy on the same parameters that overwrites nothing where nobody can tell, and its values.

    What is overwritten can neither be kept nor be computed again; an activation in place keeps a copy of it.
    """
    twin = clone_structure(gm)
    twin.meta = dict(gm.meta)
    values = study(twin, inputs)
    calls: dict[str, list[fx.Node]] = {}
    for n in twin.graph.nodes:
        if n.op == "call_module":
            calls.setdefault(str(n.target), []).append(n)
        elif n.target in _OUT_OF_PLACE and not _noticed(n, values):
            n.target = _OUT_OF_PLACE[n.target]
    for target, nodes in calls.items():
        m = twin.get_submodule(target)
        if _known(m) and getattr(m, "inplace", False) is True and not any(_noticed(n, values) for n in nodes):
            m.inplace = False  # type: ignore[assignment]
    twin.recompile()
    return twin, study(twin, inputs)


def _noticed(n: fx.Node, values: dict[str, Value]) -> bool:
    """Whether anything but n's own result lets somebody read, later, what n overwrites."""
    owner = values[n.name].owner
    if not owner or not values[owner].nbytes:  # the caller's, or the model's own
        return True
    same = [u for u in n.graph.nodes if values[u.name].owner == owner and u < n]
    return any(n < user for u in same for user in u.users)


def study(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Value]:
    """Every node's value, by name, from one forward on fake tensors of these sizes."""
    fakes, ops = concrete_fakes(gm, inputs), _Ops()
    with quiet_fakes(), fused_lstm(), fakes.mode, ops:
        walk = _Study(fakes.gm, ops, fakes.inputs)
        out = walk.run(*fakes.inputs)
    for t in tensors_in(out):  # a training step holds its outputs anyway
        if owner := walk.owners.get(storage_key(t)):
            walk.values[owner].nbytes = 0
    return walk.values


def sources(n: fx.Node, values: dict[str, Value]) -> list[str]:
    """The nodes of whose memory a node is computed; what is no tensor, and model state, apart."""
    return [u.name for u in n.all_input_nodes if u.op != "get_attr" and _holds(u, values)]


def _holds(u: fx.Node, values: dict[str, Value]) -> bool:
    """Whether a node's value is a tensor or has tensors in it."""
    picked = (x for x in u.users if getattr(x.target, "__name__", "") == "getitem")
    return values[u.name].tensor or any(values[x.name].tensor for x in picked)
