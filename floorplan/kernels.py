"""Which kernels a symbolic fake run uses: those that keep sizes symbolic and save what real ones save."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._decomp
import torch._meta_registrations
from torch._dispatch.python import enable_python_dispatcher

# PyTorch's Python kernels of these compute the same values by other ops, so autograd would save other
# tensors than in a real run: an index for each upsampled position, a boolean mask for a dropout.
_REWRITTEN = (
    "dropout", "hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
    "cudnn_batch_norm",
)  # fmt: skip
_UPSAMPLE = (
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
)  # fmt: skip
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


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
    return n * int(factor) if float(factor).is_integer() else torch.sym_int(n * factor)


def _overloads() -> Iterator[tuple[Any, Callable[..., Any] | None]]:
    for name in _REWRITTEN + _UPSAMPLE:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            own = _upsample(packet) if overload == "vec" else None
            yield getattr(packet, overload), own


@contextmanager
def symbolic_kernels() -> Iterator[None]:
    """Python kernels, which keep sizes symbolic where C++ ones would pin them (F.pad), but for the above."""
    taken = []
    for op, own in _overloads():
        taken.append((op, {k: op.py_kernels.pop(k) for k in _KEYS if k in op.py_kernels}))
        if own is not None:
            op.py_kernels.update(dict.fromkeys(_KEYS, own))
        op._dispatch_cache.clear()
    try:
        with enable_python_dispatcher():
            yield
    finally:
        for op, theirs in taken:
            for k in _KEYS:
                op.py_kernels.pop(k, None)
            op.py_kernels.update(theirs)
            op._dispatch_cache.clear()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a traceback for an op whose failure is reported by name anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
