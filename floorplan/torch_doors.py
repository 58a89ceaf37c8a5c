"""torch's insides, each under a name of our own: no other file reads a private name of torch or changes one.

torch promises none of this to stay; tests/test_torch_doors.py says of each what is relied on.
"""

import linecache
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import attrgetter, methodcaller
from typing import Any, cast
from unittest.mock import patch

import torch
import torch._decomp  # these two give ops their Python kernels
import torch._meta_registrations
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._C._autograd import _get_sequence_nr
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher  # ops by Python kernels
from torch._dynamo.source import ConstantSource as ConstantSource  # names a symbol
from torch._guards import SLoc
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # a tensor without data
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # makes and runs them
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every op that runs under it
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter as tree_iter  # the leaves of nested containers
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._sympy.functions import FloorDiv as FloorDiv  # a // b in the size of a fake
from torch.utils._sympy.functions import Mod as Mod  # a % b there

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack of a saved tensor

# --- modules
# The classes that layers of one kind share, in 1-D, 2-D and 3-D.
ConvNd = nn.modules.conv._ConvNd
BatchNormNd = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase  # InstanceNorm too
MaxPoolNd = nn.modules.pooling._MaxPoolNd
AvgPoolNd = nn.modules.pooling._AvgPoolNd
AdaptiveMaxPoolNd = nn.modules.pooling._AdaptiveMaxPoolNd
AdaptiveAvgPoolNd = nn.modules.pooling._AdaptiveAvgPoolNd
DropoutNd = nn.modules.dropout._DropoutNd

FORWARDS = ("forward", "_conv_forward")  # the methods that say what a layer computes
STORES = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}  # what vars() of a module holds
COMPILED_CALL = "_compiled_call_impl"  # what Module.compile() puts in place of the forward
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")

# A module's own, without those of its submodules: what is written into these is registered.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")  # two names: twice
transient_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")  # not in a state_dict


def tensors_of(m: nn.Module) -> dict[str, Tensor | None]:
    """The module's own parameters and buffers."""
    return {**m._parameters, **m._buffers}


def hooks_of(m: nn.Module) -> dict[str, list[Callable[..., Any]]]:
    """The hooks on a module's calls by kind, where there are any."""
    found = {kind: list(getattr(m, f"_{kind}").values()) for kind in _HOOKS}
    return {kind: hooks for kind, hooks in found.items() if hooks}


def has_gradient_hook(t: Tensor) -> bool:
    """Whether a tensor runs code when its gradient is known."""
    return bool(t._backward_hooks or cast(Any, t)._post_accumulate_grad_hooks)


eager_of: Callable[[nn.Module], nn.Module] = methodcaller("get_submodule", "_orig_mod")  # behind a compiled module


# --- tensors and autograd

saved_hooks: Callable[[], Hooks | None]  # the saved-tensor hooks in force, the innermost ones
saved_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
next_number = _get_sequence_nr  # what autograd will number its next node
version_of: Callable[[Tensor], int] = attrgetter("_version")  # how often a tensor has been written to
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")  # what autograd numbered one of its nodes as it made it


def storage_key(t: Tensor) -> int:
    """Identity of the storage behind t, valid while it is alive."""
    return int(t.untyped_storage()._cdata)


def running_number() -> int | None:
    """The number of the autograd node whose backward runs; None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else number_of(node)


@lru_cache(maxsize=1024)
def saved_names(kind: type) -> tuple[str, ...]:
    """The attributes under which autograd nodes of a class show what they have saved."""
    return tuple(n for n in dir(kind) if n.startswith("_saved_") or n == "saved_tensors")


transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active  # whether a transform of torch.func runs


def forward_mode() -> bool:
    """Whether a forward-mode derivative is among the transforms that run."""
    return any(str(i.key()) == "TransformType.Jvp" for i in torch._C._functorch.get_interpreter_stack() or ())


def gradient_levels(t: Tensor) -> tuple[int, ...]:
    """The levels of torch.func at which t needs a gradient; 0 is autograd's own."""
    level = max(torch._C._functorch.maybe_get_level(t), 0)
    inner = gradient_levels(torch._C._functorch.get_unwrapped(t)) if level else ()
    return (level, *inner) if t.requires_grad else inner


@contextmanager
def saving(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Saved tensors go through these; selective checkpointing, which keeps some itself, says nothing of it."""
    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context")
        yield


# --- fakes and ops

no_modes = _disable_current_modes  # a context in which ops run unseen, on real tensors
VALUES_ASKED = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)  # content needed
READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # .item()
BATCH_NORMS = (torch.ops.aten._native_batch_norm_legit.default, torch.ops.aten._native_batch_norm_legit.no_stats)
ADAPTIVE_BACKWARD = {2: torch.ops.aten._adaptive_avg_pool2d_backward, 3: torch.ops.aten._adaptive_avg_pool3d_backward}
LOG_SOFTMAX_BACKWARD = torch.ops.aten._log_softmax_backward_data.default
OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
schema_of: Callable[[Any], Any] = attrgetter("_schema")  # name, overload_name, arguments and returns of an op
op_names = torch._C._dispatch_get_all_op_names  # as NAMESPACE::NAME[.OVERLOAD], without TorchScript's own: aten::save


def directly(like: Any, kernel: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A fake beside `like` of what torch's C++ kernel makes of fakes, past their own Python dispatch."""
    with fake_tensor.in_kernel_invocation_manager(like.fake_mode):
        out = kernel(*args, **kwargs)
    return FakeTensor(like.fake_mode, out, like.fake_device)


def wants_values(e: Exception) -> bool:
    """Whether a run on fake tensors failed because it asked for the content of one."""
    words = ("DataDependent", "DynamicOutputShape", "_local_scalar_dense", ".numpy() is not supported")
    return any(word in f"{type(e).__name__} {e}" for word in words)


class SymbolEnv(ShapeEnv):
    """Symbolic sizes and what is known of them; a subclass says which symbols may be learned to equal something."""

    def replaces(self, symbol: Any, value: Any) -> bool:
        """Whether a comparison may put an expression in a symbol's place."""
        return True

    def decided(self, comparison: Any) -> bool:
        """Whether a comparison follows from what is known already."""
        return self._maybe_evaluate_static(comparison) is not None

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        """Where a guard came from: nobody asks, and torch would import its compiler to tell frames of its own apart."""
        return SLoc(framework_loc, None), ""

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if self.replaces(a, tgt):
            super()._set_replacement(a, tgt, msg)


def kernel_of(op: Any) -> Any:
    """A custom op, or the function behind it where nobody watches: a call of the op costs more than a small map."""
    return op if torch._C._len_torch_dispatch_stack() else op._init_fn


def slow_transposed(args: Iterable[Any]) -> bool:
    """Whether torch computes a convolution of real tensors by its own transposed 3-D kernel."""
    return bool(torch._C._select_conv_backend(*args) == cast(Any, torch._C)._ConvBackend.SlowTranspose3d)


# --- torch.fx

PROXY_FIELDS = frozenset(("tracer", "node", "root", "attr", "_node"))  # what fx itself sets on its proxies
CONSTANT = "_tensor_constant"  # how the attributes begin that fx makes of constant tensors
is_erased: Callable[[fx.Node], bool] = attrgetter("_erased")  # whether a node was taken out of its graph


def renew(a: fx.proxy.Attribute) -> None:
    """Let an attribute of a traced value, whose node was taken out, make another."""
    if a._node is not None and is_erased(a._node):
        a._node = None


def forget_tracer(graph: fx.Graph) -> None:
    """Let a graph be copied and saved without the tracer that made it."""
    graph._tracer_cls = None


def calls_plainly(graph: fx.Graph) -> bool:
    """Whether a graph's code takes its placeholders as arguments; torch.export's takes trees."""
    return type(graph._codegen) is fx.graph.CodeGen


# --- what is changed while torch runs

_PYTHON_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def other_kernels(kernels: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Ops run a Python kernel of ours meanwhile, or for None torch's C++ kernel, in place of torch's Python one."""
    taken = {op: {k: op.py_kernels.pop(k) for k in _PYTHON_KEYS if k in op.py_kernels} for op in kernels}
    try:
        for op, own in kernels.items():
            op._dispatch_cache.clear()
            if own is not None:
                op.py_kernels.update(dict.fromkeys(_PYTHON_KEYS, own))
                if any(op._get_dispatch(k) is not own for k in _PYTHON_KEYS):
                    raise _changed(f"a Python kernel of {op}")
        yield
    finally:
        for op, theirs in taken.items():
            for k in _PYTHON_KEYS:
                op.py_kernels.pop(k, None)
            op.py_kernels.update(theirs)
            op._dispatch_cache.clear()


@contextmanager
def sizes_as_text(told: Callable[[Any], None]) -> Iterator[None]:
    """told(size) is called meanwhile whenever a symbolic size is written as text."""
    plain: Any = torch.SymInt.__repr__

    def text(size: Any) -> str:
        told(size)
        return str(plain(size))

    with patch.object(torch.SymInt, "__repr__", text):
        yield


@contextmanager
def other_lstm(run: Callable[..., Any]) -> Iterator[None]:
    """nn.LSTM calls run(torch's own function, *its arguments) meanwhile."""
    forward = cast(Any, nn.LSTM.forward)
    calls = getattr(forward, "__globals__", {}).get("_VF") is torch._VF and "lstm" in forward.__code__.co_names
    if forward.__module__ == nn.LSTM.__module__ and not calls:  # a user's own forward may do as it likes
        raise _changed("nn.LSTM's function")
    with patch.object(torch._VF, "lstm", partial(run, torch._VF.lstm), create=True):
        yield


def _changed(what: str) -> RuntimeError:
    return RuntimeError(f"torch {torch.__version__}: {what} cannot be replaced as in 2.13 and 2.14; use one of these")


def show_source(name: str, text: str) -> None:
    """Let tracebacks and debuggers show the lines of code that was compiled under a name that is no file."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)


# --- tensors in containers


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers (dataclass outputs too)."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from tensors_in(_held(leaf))


def map_tensors(f: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same containers with f of every tensor, in the order of `tensors_in`."""

    def of(leaf: Any) -> Any:
        if not hasattr(leaf, "__dataclass_fields__") or isinstance(leaf, type):
            return f(leaf) if isinstance(leaf, Tensor) else leaf
        twin = cast(Any, type(leaf)).__new__(type(leaf))  # its own code need not take what it made itself
        made = {k: map_tensors(f, v) for k, v in _held(leaf).items()}
        for k, v in made.items():
            object.__setattr__(twin, k, v)
        if isinstance(leaf, dict):  # the outputs of Hugging Face models are both
            items = {k: made.get(k, leaf[k]) for k in leaf}
            (OrderedDict if isinstance(leaf, OrderedDict) else dict).update(twin, items)
        return twin

    return tree_map(of, tree)


def _held(record: Any) -> dict[str, Any]:
    """What a dataclass holds, by name."""
    named = {k: getattr(record, k) for k in record.__dataclass_fields__ if hasattr(record, k)}
    return named | getattr(record, "__dict__", {})
