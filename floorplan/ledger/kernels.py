"""Make fake runs save and allocate what real ones do, with sizes that stay symbolic."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from floorplan import torch_doors as doors
from floorplan.layers.activations import ACTIVATIONS
from floorplan.layers.bits import format_of, layout_of
from floorplan.ledger.recurrent import LAYER, LAYER_BACKWARD, two_bias_gradients, with_workspace
from floorplan.ledger.sizes import concatenated, made, made_like, viewed, with_names
from floorplan.torch_doors import FakeTensor, tree_iter

# PyTorch's Python kernels of these compute the same values by other ops, so autograd would save other
# tensors than in a real run: an index for each upsampled position, a boolean mask for a dropout.
_REWRITTEN = (
    "dropout hardshrink softshrink multi_margin_loss multilabel_margin_loss_forward "
    "cudnn_batch_norm gru lstm rnn_relu rnn_tanh"
).split()


def _upsample(packet: Any) -> Callable[..., Any]:
    """The .vec overload by the plain one: the C++ kernel between them takes no symbolic sizes."""

    def kernel(x: Any, output_size: Any, *rest: Any) -> Any:
        factors = rest[-1]
        if output_size is None:
            output_size = [_scaled(n, f) for n, f in zip(x.shape[2:], factors, strict=True)]
        scales = factors or [None] * (x.dim() - 2)
        return packet.default(x, output_size, *rest[:-1], *scales)

    return kernel


def _scaled(n: Any, factor: float) -> Any:
    return n * int(factor) if float(factor).is_integer() else cast(Any, torch.sym_int)(n * factor)


@cache
def _kernels() -> dict[Any, Callable[..., Any] | None]:
    """What each of these ops runs in place of torch's Python kernel: ours, or None for the C++ one."""
    packets = [getattr(torch.ops.aten, n) for n in (*_REWRITTEN, *upsamplings()) if hasattr(torch.ops.aten, n)]
    return {getattr(p, o): _upsample(p) if o == "vec" else None for p in packets for o in p.overloads()}


@contextmanager
def symbolic_kernels() -> Iterator[None]:
    """Python kernels, which keep sizes symbolic where C++ ones would pin them (F.pad), but for the above."""
    with doors.other_kernels(_kernels()), doors.enable_python_dispatcher():
        yield


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a traceback for an op whose failure is reported by name anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _full_statistics(args: Sequence[Any], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """A CPU BatchNorm of a 16-bit map by 32-bit weights keeps 32-bit statistics; its fake keeps 16."""
    kinds = {t.dtype for t in args[1:5] if isinstance(t, Tensor)}
    if out[0].device.type != "cpu" or out[0].dtype not in (torch.bfloat16, torch.float16) or kinds != {torch.float32}:
        return out
    return (out[0], *(t.new_empty(t.shape, dtype=torch.float32) for t in out[1:]))


def _roomy(args: Sequence[Any], out: Tensor) -> Tensor:
    """torch's own transposed 3-D convolution on a CPU puts its result in memory of its input's size."""
    x = args[0]
    transposed = out.dim() == 5 and len(args) == 9 and bool(args[6]) and args[8] == 1
    if not transposed or x.device.type != "cpu" or _is_symbolic(x) or out.numel() >= x.numel():
        return out
    with doors.no_modes():  # torch chooses by sizes, dtype and the number of threads
        real = [t if t is None else torch.empty(t.shape, dtype=t.dtype) for t in args[:3]]
        slow = doors.slow_transposed((*real, *args[3:]))
    return torch.empty_like(x).resize_(out.shape) if slow else out


def _roomy_loss(at: int) -> Callable[[Sequence[Any], Any], Any]:
    """A loss reduced to one number lies in the memory of its map; `at` is where its reduction stands."""

    def correct(args: Sequence[Any], out: Tensor) -> Tensor:
        x, y = args[:2]
        if (args[at] if len(args) > at else 1) == 0 or _is_symbolic(x) or _is_symbolic(y):
            return out
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        return out.new_empty(shape).resize_(())

    return correct


def _in_order(args: Sequence[Any], out: Tensor) -> Tensor:
    """torch's own kernels of some losses' backward put the gradient in a contiguous tensor, however the map lies."""
    return (
        out
        if out.is_contiguous() or _is_symbolic(out)
        else torch.empty_like(out, memory_format=torch.contiguous_format)
    )


def _as_the_map(args: Sequence[Any], out: Any) -> Any:
    """Gradients of a BatchNorm and of padding lie as the map that went in, on a CPU; their fakes do not."""
    x = args[1]
    g, *more = out if isinstance(out, tuple) else (out,)
    if g is None or x.device.type != "cpu" or _is_symbolic(x):
        return out
    g = torch.empty_like(g, memory_format=format_of(x, layout_of(x)))
    return (g, *more) if isinstance(out, tuple) else g


def _as_a_sum(args: Sequence[Any], out: Tensor) -> Tensor:
    """A gradient that torch's Python kernel makes by a choice lies as the op's two maps do when they are added."""
    return out if _is_symbolic(out) else torch.empty_like(_aten.add.Tensor(*args[:2]))


_aten = torch.ops.aten
_PADS = ("reflection", "replication")
_CORRECTIONS: dict[Any, Callable[[Sequence[Any], Any], Any]] = {
    LAYER: with_workspace,
    LAYER_BACKWARD: two_bias_gradients,
    _aten.convolution.default: _roomy,
    _aten.mse_loss.default: _roomy_loss(2),
    _aten.smooth_l1_loss.default: _roomy_loss(2),
    _aten.soft_margin_loss.default: _roomy_loss(2),
    _aten.mse_loss_backward.default: _in_order,
    _aten.smooth_l1_loss_backward.default: _in_order,
    _aten.huber_loss_backward.default: _in_order,
    doors.LOG_SOFTMAX_BACKWARD: _in_order,
    _aten.binary_cross_entropy.default: _roomy_loss(3),
    _aten.native_batch_norm.default: _full_statistics,
    _aten.native_batch_norm_backward.default: _as_the_map,
    **{getattr(_aten, f"{kind}_pad{n}d_backward").default: _as_the_map for kind in _PADS for n in (1, 2, 3)},
    _aten.hardtanh_backward.default: _as_a_sum,
    _aten.hardsigmoid_backward.default: _as_a_sum,
    **dict.fromkeys(doors.BATCH_NORMS, _full_statistics),
}


_POINTWISE = frozenset(name for a in ACTIVATIONS.values() for name in a.kernels.split())
_IN_PLACE = frozenset(f"{name}_" for name in _POINTWISE | {"zero"})
_VIEWS = (_aten.view.default, _aten.reshape.default)


# Their shapes, strides and aliases are computed in C++ by the code that real tensors go through.
_DIRECT = (_aten.slice.Tensor, _aten.detach.default, _aten.cat.default)
_OF_EQUAL = (_aten.add.Tensor, _aten.threshold_backward.default)
_NORMS = {_aten.native_batch_norm.default: 5, _aten.native_batch_norm_backward.default: 7}  # where `training` stands


def _concrete(func: Any, args: Sequence[Any]) -> Any:
    """The result of a common op on concrete fakes, None if torch's Python kernels and caches have to see it."""
    if func not in _DIRECT and func not in _OF_EQUAL and func not in _NORMS:
        return None
    tensors = args[0] if func is _aten.cat.default else [t for t in args if isinstance(t, Tensor)]
    x = tensors[0]
    if not all(_is_plain(t, x) for t in tensors):
        return None
    if func in _DIRECT:
        return doors.directly(x, func, *args)
    alike = all(t.dtype == torch.float32 for t in tensors)
    if func in _OF_EQUAL:
        alike = alike and len(tensors) == 2 and x.shape == tensors[1].shape and all(map(_is_ordered, tensors))
        return made(x, x.shape) if alike else None
    maps = tensors[: 1 + (func is _aten.native_batch_norm_backward.default)]
    if not alike or x.device.type != "cpu" or args[_NORMS[func]] is not True or not all(map(_is_a_map, maps)):
        return None
    return tuple(made(x, s) for s in (x.shape, x.shape[1:2], x.shape[1:2]))


def _is_plain(t: Any, like: Any) -> bool:
    """Whether a fake of one dimension or more stands beside another, without symbols and without a known value."""
    alike = type(t) is FakeTensor and t.fake_mode is like.fake_mode and t.fake_device == like.fake_device
    return alike and t.constant is None and t.dim() > 0 and not _is_symbolic(t)


def _is_ordered(x: Tensor) -> bool:
    """Whether each stride is longer than the next: what is made of such maps of one shape is contiguous."""
    return 1 not in x.shape and all(a > b for a, b in pairwise(x.stride()))


def _is_a_map(x: Tensor) -> bool:
    """Whether strides say that this is [B, C, H, W] and no channels-last map."""
    return x.dim() == 4 and x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)


def _shortcut(func: Any, args: Sequence[Any]) -> Any:
    """The result of a common op on a symbolic fake, None if it has to be run.

    Decomposed, each of these makes hundreds of symbolic comparisons. A wrong one would be noticed:
    what the symbolic run keeps must have the sizes of the exact run, which does not come this way.
    """
    if func is _aten.cat.default:
        return concatenated(*args)
    if not args or not _is_symbolic(args[0]) or len(doors.schema_of(func).returns) == 0:
        return None
    x, name = args[0], doors.schema_of(func).name.removeprefix("aten::")
    if name in _IN_PLACE:
        return x
    if name in _POINTWISE and not doors.schema_of(func).overload_name and x.is_floating_point():
        return made_like(x)
    if func in doors.BATCH_NORMS and args[-3] is True:
        return made_like(x), made(x, x.shape[1:2]), made(x, x.shape[1:2])
    return None


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, FakeTensor) and any(isinstance(n, torch.SymInt) for n in x.shape)


def as_really_run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run one op; where its fake makes other results than the op itself does, give those of the op."""
    return with_names(func, _really(func, args, kwargs))


def _really(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    args = viewed(args) if func in _VIEWS else args
    out = _concrete(func, args) if not kwargs else None
    out = _shortcut(func, args) if out is None and not kwargs else out
    out = func(*args, **kwargs) if out is None else out
    if (fix := _CORRECTIONS.get(func)) is not None and any(isinstance(t, FakeTensor) for t in tree_iter(out)):
        out = fix(args, out)
    arguments = doors.schema_of(func).arguments
    if not arguments or arguments[-1].name != "output_mask" or len(args) < len(arguments):
        return out
    # Fakes of a backward make all gradients, asked for or not.
    return tuple(t if wanted else None for t, wanted in zip(out, args[-1], strict=True))


@cache
def upsamplings() -> tuple[str, ...]:
    """Names of torch's forward upsampling ops, antialiasing and exact ones too."""
    names = (n.removeprefix("aten::").split(".")[0] for n in doors.op_names() if n.startswith("aten::"))
    return tuple(sorted({n for n in names if "upsample_" in n and "backward" not in n}))


def on_fakes(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose torch calls do to fakes what they do to real tensors."""

    def run(*args: Any) -> Any:
        with _Really():
            return f(*args)

    return run


class _Really(TorchFunctionMode):
    """one_hot compares fakes with a range; real tensors it fills one by one, and a CPU looks at their values first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_one_hot if func is F.one_hot else func)(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1:
        num_classes = int(tensor.max().item()) + 1
    elif tensor.device.type == "cpu" and tensor.numel():
        torch.ops.aten.aminmax(tensor)
    out = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)
