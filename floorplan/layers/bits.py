"""Masks and small integers kept in as few bits as they need.

    pack_gate     z -> one bit an element: lo < z < hi, in z's memory order
    apply_gate    g, bits -> g*inside where the bit is 1, g*outside where it is 0
    apply_gate_   the same in g's own buffer
    pack_fields   uint8 -> 1, 2, 4 or 8 bits an element
    unpack_fields the inverse

Field i of width b sits in byte i*b//8, low bits first. On CPU numpy does the bits on views, a
segment at a time; elsewhere torch shifts do. No mask of the size of the map ever exists on CPU.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from floorplan.layers.functions import by_sample
from floorplan.torch_doors import transformed

CPU_SEGMENT = 1 << 18  # elements at a time: fits the cache
SEGMENT = 1 << 24  # elsewhere: few launches, 16 MB of temporaries
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = (torch.float32, torch.float64)  # numpy compares these with SIMD


def layout_of(z: Tensor) -> int:
    """1 if z (B, C, H, W) or (B, C, D, H, W) is channels_last and not also contiguous, else 0."""
    if z.dim() not in (4, 5) or transformed():  # batched tensors do not tell their memory format
        return 0
    if all(isinstance(n, int) for n in (*z.shape, *z.stride())):
        return int(not z.is_contiguous() and z.is_contiguous(memory_format=format_of(z, 1)))
    dims = range(z.dim())
    return int(_has_strides(z, [0, *dims[2:], 1]) and not _has_strides(z, dims))


def _has_strides(z: Tensor, order: Sequence[int]) -> bool:
    """Whether z is dense with dimensions nested in `order`; adds no guard to a symbolic size."""
    stride = 1
    for d in reversed(order):
        if not statically_known_true(z.shape[d] == 1) and not statically_known_true(z.stride(d) == stride):
            return False
        stride = stride * z.shape[d]
    return True


def format_of(z: Tensor, layout: int) -> torch.memory_format:
    if layout == 0:
        return torch.contiguous_format
    return torch.channels_last if z.dim() == 4 else torch.channels_last_3d


def as_layout(z: Tensor, layout: int) -> Tensor:
    """z dense in `layout`; itself if it is."""
    return z.contiguous(memory_format=format_of(z, layout))


def empty_like_map(like: Tensor, shape: Sequence[int], layout: int | None = None) -> Tensor:
    """Memory of another shape with as many dimensions, in `layout` or laid out as `like` is."""
    form = format_of(like, layout_of(like) if layout is None else layout)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=form)


def bytes_for(n: int, bits: int, device: torch.device) -> Tensor:
    """Memory of n fields of `bits` bits."""
    return torch.empty((n * bits + 7) // 8, dtype=torch.uint8, device=device)


def dense_in(z: Tensor, layout: int) -> bool:
    """Whether the memory order of z is that of `layout`, without gaps."""
    return z.is_contiguous(memory_format=format_of(z, layout))


def flat_view(z: Tensor, layout: int) -> Tensor:
    """z, dense in `layout`, as a 1-D view in memory order."""
    return (z.movedim(1, -1) if layout else z).view(-1)


def _segments(n: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Slices of n elements and of the bytes that hold their bits."""
    for i in range(0, n, step):
        j = min(i + step, n)
        yield slice(i, j), slice(i // 8, (j + 7) // 8)


def spread(n: int, work: Callable[[slice, slice], None], threads: bool) -> None:
    """work(elements, bytes of their bits) for every segment of n; by torch's number of threads where it may.

    numpy lets go of the interpreter's lock; torch ops would start a team of threads in each thread.
    """
    parts = list(_segments(n, CPU_SEGMENT))
    teams = max(1, min(torch.get_num_threads(), len(parts))) if threads else 1

    def some(k: int) -> None:
        for part, where in parts[k::teams]:
            work(part, where)

    others = [_pool(os.getpid()).submit(some, k) for k in range(1, teams)]
    some(0)
    for o in others:
        o.result()


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork does not inherit them."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="floorplan")


@torch.library.custom_op("floorplan::pack_gate", mutates_args=())
def pack_gate(z: Tensor, lo: float, hi: float, closed: bool) -> Tensor:
    """Bits of lo < z < hi (lo <= z <= hi if closed), z of any shape -> uint8 (ceil(numel/8),)."""
    layout = layout_of(z)
    z = flat_view(as_layout(z.detach(), layout), layout)
    out = bytes_for(z.numel(), 1, z.device)
    pack = _pack_gate_numpy if z.device.type == "cpu" else _pack_gate_torch
    pack(z, lo, hi, closed, out)
    return out


@pack_gate.register_fake
def _(z: Tensor, lo: float, hi: float, closed: bool) -> Tensor:
    return bytes_for(z.numel(), 1, z.device)


def _pack_gate_numpy(z: Tensor, lo: float, hi: float, closed: bool, out: Tensor) -> None:
    bits, values = out.numpy(), z.numpy() if z.dtype in _NUMPY else z

    def work(part: slice, where: slice) -> None:
        mask = between(values[part], lo, hi, closed)
        bits[where] = np.packbits(np.asarray(mask), bitorder="little")

    spread(z.numel(), work, z.dtype in _NUMPY)


def _pack_gate_torch(z: Tensor, lo: float, hi: float, closed: bool, out: Tensor) -> None:
    for part, where in _segments(z.numel(), SEGMENT):
        mask = between(z[part], lo, hi, closed)
        out[where] = pack_by_shifts(mask.view(torch.uint8), 1)


def between(z: Any, lo: float, hi: float, closed: bool) -> Any:
    """lo < z < hi; an infinite bound is not compared with."""
    if lo == -math.inf and hi == math.inf:
        return z == z
    if lo == -math.inf:
        return z <= hi if closed else z < hi
    mask = z >= lo if closed else z > lo
    if hi != math.inf:
        mask &= z <= hi if closed else z < hi
    return mask


@torch.library.custom_op("floorplan::apply_gate", mutates_args=())
def apply_gate(g: Tensor, packed: Tensor, layout: int, inside: float, outside: float) -> Tensor:
    """A new tensor like g, dense in `layout`: g*inside where the bit is 1, g*outside where it is 0.

    packed: uint8 (ceil(g.numel()/8),), in the memory order of `layout`. A factor 0 gives exact
    zeros and a factor 1 exact copies, whatever g holds.
    """
    source, out = source_and_target(g, layout)
    run = _apply_numpy if g.device.type == "cpu" else _apply_torch
    run(flat_view(source, layout), packed, inside, outside, flat_view(out, layout))
    return out


def source_and_target(g: Tensor, layout: int) -> tuple[Tensor, Tensor]:
    """g dense in `layout`, and new memory for a result: that of a copy of g, where one had to be made."""
    source = as_layout(g.detach(), layout)
    return source, torch.empty_like(source) if source.data_ptr() == g.data_ptr() else source


@apply_gate.register_fake
def _(g: Tensor, packed: Tensor, layout: int, inside: float, outside: float) -> Tensor:
    return torch.empty_like(g, memory_format=format_of(g, layout))


by_sample(pack_gate, apply_gate)


@torch.library.custom_op("floorplan::apply_gate_", mutates_args=("g",))
def apply_gate_(g: Tensor, packed: Tensor, layout: int, inside: float, outside: float) -> None:
    """`apply_gate` in the buffer of g, which is dense in `layout`."""
    run = _apply_numpy if g.device.type == "cpu" else _apply_torch
    flat = flat_view(g.detach(), layout)
    run(flat, packed, inside, outside, flat)


@apply_gate_.register_fake
def _(g: Tensor, packed: Tensor, layout: int, inside: float, outside: float) -> None:
    return None


def _apply_numpy(g: Tensor, packed: Tensor, inside: float, outside: float, out: Tensor) -> None:
    bits, n = packed.numpy(), g.numel()
    ints = _INTS[g.element_size()]
    plain = {inside, outside} == {0.0, 1.0}  # the common gate: nothing but bits
    source, target = (g.view(ints).numpy(), out.view(ints).numpy()) if plain else (None, None)

    def work(part: slice, where: slice) -> None:
        m = np.unpackbits(bits[where], count=part.stop - part.start, bitorder="little").view(np.int8)
        if source is None or target is None:
            _select(g[part], torch.from_numpy(m).view(torch.uint8), inside, outside, out[part])
        else:
            np.bitwise_and(source[part], np.negative(m) if inside else m - np.int8(1), out=target[part])

    spread(n, work, plain)


def _apply_torch(g: Tensor, packed: Tensor, inside: float, outside: float, out: Tensor) -> None:
    for part, where in _segments(g.numel(), SEGMENT):
        _select(g[part], unpack_by_shifts(packed[where], g[part].numel(), 1), inside, outside, out[part])


def _select(g: Tensor, m: Tensor, inside: float, outside: float, out: Tensor) -> None:
    """out = g*inside where m (uint8, 0 or 1) is 1, else g*outside; out may be g."""
    if not inside and not outside:
        out.zero_()
        return
    # all ones where the bit is set, all zeros elsewhere (the other way round if only `outside`
    # counts): integer ops copy inf, nan and 1.0*g exactly and vectorize better than torch.where
    keep = m.view(torch.int8).neg_() if inside else m.view(torch.int8).sub_(1)
    ints = _INTS[g.element_size()]
    if inside and outside:
        kept = g if inside == 1.0 else g * inside
        other = (g if outside == 1.0 else g * outside).view(ints)
        differ = (kept.view(ints) ^ other).bitwise_and_(keep)
        torch.bitwise_xor(other, differ, out=out.view(ints))
        return
    factor = inside or outside
    kept = g if factor == 1.0 else torch.mul(g, factor, out=out)
    torch.bitwise_and(kept.view(ints), keep, out=out.view(ints))


@torch.library.custom_op("floorplan::pack_fields", mutates_args=())
def pack_fields(v: Tensor, bits: int) -> Tensor:
    """v: uint8, any shape, values < 2**bits, bits 1, 2, 4 or 8 -> uint8 (ceil(numel*bits/8),)."""
    v = v.detach().contiguous().view(-1)
    if bits == 1 and v.device.type == "cpu":
        return torch.from_numpy(np.packbits(v.numpy(), bitorder="little"))
    return pack_by_shifts(v, bits)


@pack_fields.register_fake
def _(v: Tensor, bits: int) -> Tensor:
    return bytes_for(v.numel(), bits, v.device)


def pack_by_shifts(v: Tensor, bits: int) -> Tensor:
    each = 8 // bits
    if v.numel() % each:
        v = torch.nn.functional.pad(v, (0, each - v.numel() % each))
    columns = v.view(-1, each)
    out = columns[:, 0].clone()
    for i in range(1, each):
        out |= columns[:, i] << (i * bits)
    return out


@torch.library.custom_op("floorplan::unpack_fields", mutates_args=())
def unpack_fields(packed: Tensor, n: int, bits: int) -> Tensor:
    """The n fields of `bits` bits that pack_fields put into `packed` -> uint8 (n,)."""
    if bits == 1 and packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=n, bitorder="little"))
    return unpack_by_shifts(packed, n, bits)


@unpack_fields.register_fake
def _(packed: Tensor, n: int, bits: int) -> Tensor:
    return torch.empty(n, dtype=torch.uint8, device=packed.device)


def unpack_by_shifts(packed: Tensor, n: int, bits: int) -> Tensor:
    each = 8 // bits
    out = torch.empty(packed.numel(), each, dtype=torch.uint8, device=packed.device)
    for i in range(each):
        torch.bitwise_and(packed >> (i * bits), (1 << bits) - 1, out=out[:, i])
    return out.view(-1)[:n]
