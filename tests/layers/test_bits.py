"""Bits: packing, unpacking and gating, on the CPU path and on the path of other devices."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from floorplan.layers import bits
from floorplan.layers.bits import (
    apply_gate,
    apply_gate_,
    as_layout,
    dense_in,
    empty_like_map,
    layout_of,
    pack_fields,
    pack_gate,
    unpack_fields,
)

FACTORS = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.25), (0.3, 0.0), (0.3, 0.2), (0.0, 0.3), (1.0, 1.0), (0.0, 0.0)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def laid_out(z: Tensor, layout: int) -> Tensor:
    return z.contiguous(memory_format=bits.format_of(z, layout))


def symbolic(device: str, layout: int) -> tuple[FakeTensorMode, Tensor]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    z = laid_out(torch.empty(7, 5, 11, 13, device=device), layout)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 4)
    return mode, mode.from_tensor(z, symbolic_context=context)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17,), (3, 5, 7, 3), (2, 3, 4, 5, 3)])
@pytest.mark.parametrize("layout", [0, 1])
def test_gate_on_both_paths(dtype: torch.dtype, shape: tuple[int, ...], layout: int) -> None:
    if layout and len(shape) < 4:
        layout = 0
    z = laid_out(torch.randn(shape, dtype=dtype), layout)
    g = torch.randn(shape, dtype=dtype)
    packed = pack_gate(z, -0.5, 0.5, False)
    assert layout_of(z) == layout and packed.numel() == (z.numel() + 7) // 8
    other = torch.empty_like(packed)
    bits._pack_gate_torch(bits.flat_view(z, layout), -0.5, 0.5, False, other)
    assert torch.equal(packed, other)
    for inside, outside in FACTORS:
        want = torch.where((z > -0.5) & (z < 0.5), g * inside, g * outside)
        got = apply_gate(g, packed, layout, inside, outside)
        assert torch.equal(got, want) and layout_of(got) == layout
        flat = torch.empty_like(bits.flat_view(got, layout))
        source = bits.flat_view(laid_out(g, layout), layout)
        bits._apply_torch(source, packed, inside, outside, flat)
        assert torch.equal(flat, bits.flat_view(got, layout))


@pytest.mark.parametrize("path", ["numpy", "torch"])
def test_segments_join_without_seams(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "CPU_SEGMENT", 16)
    monkeypatch.setattr(bits, "SEGMENT", 16)
    z, out = torch.randn(61), torch.empty(8, dtype=torch.uint8)
    getattr(bits, f"_pack_gate_{path}")(z, 0.0, math.inf, False, out)
    want = np.packbits((z > 0).numpy(), bitorder="little")
    assert np.array_equal(out.numpy(), want)
    gx = torch.empty(61)
    getattr(bits, f"_apply_{path}")(z, out, 1.0, 0.0, gx)
    assert torch.equal(gx, z.clamp(min=0))


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("lo,hi", [(0.0, 6.0), (-math.inf, 6.0), (0.0, math.inf), (-math.inf, math.inf)])
def test_boundary_values(lo: float, hi: float, closed: bool) -> None:
    z = torch.tensor([0.0, 6.0, -0.0, 3.0, -1e-30, 7.0, math.nan, math.inf, -math.inf])
    want = (z >= lo) & (z <= hi) if closed else (z > lo) & (z < hi)
    if hi == math.inf:
        want |= z == math.inf
    if lo == -math.inf:
        want |= z == -math.inf
    assert torch.equal(unpack_fields(pack_gate(z, lo, hi, closed), 9, 1).bool(), want)


def test_zero_factor_clears_inf_and_nan_and_one_copies_them() -> None:
    g = torch.tensor([math.inf, math.nan, -math.inf, -0.0])
    packed = pack_fields(torch.tensor([0, 0, 1, 1], dtype=torch.uint8), 1)
    assert apply_gate(g, packed, 0, 1.0, 0.0).tolist() == [0.0, 0.0, -math.inf, 0.0]
    assert torch.equal(apply_gate(g, packed, 0, 1.0, 0.0)[3].signbit(), torch.tensor(True))


def test_gradient_in_another_layout_and_expanded() -> None:
    z = laid_out(torch.randn(2, 3, 5, 5), 1)
    packed = pack_gate(z, 0.0, math.inf, False)
    g = torch.randn(2, 3, 5, 5)
    kept = g.clone()
    assert torch.equal(apply_gate(g, packed, 1, 1.0, 0.0), torch.where(z > 0, g, 0.0))
    assert torch.equal(g, kept)
    one = torch.ones(()).expand(2, 3, 5, 5)
    assert torch.equal(apply_gate(one, packed, 1, 1.0, 0.0), (z > 0).float())


def test_neither_layout_is_packed_contiguously() -> None:
    z = torch.randn(4, 6, 5, 3).permute(3, 1, 0, 2)
    assert layout_of(z) == 0
    assert torch.equal(pack_gate(z, 0.0, 1.0, False), pack_gate(z.contiguous(), 0.0, 1.0, False))


def test_both_layouts_count_as_contiguous() -> None:
    assert layout_of(torch.randn(3, 1, 4, 4)) == 0
    assert layout_of(torch.randn(3, 4, 1, 1).to(memory_format=torch.channels_last)) == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layout", [0, 1])
def test_symbolic_shapes_add_no_guards(device: str, layout: int) -> None:
    mode, z = symbolic(device, layout)
    with mode:
        packed = pack_gate(z, 0.0, 6.0, False)
        gx = apply_gate(z, packed, layout_of(z), 1.0, 0.0)
        offsets = pack_fields(torch.empty(z.shape, dtype=torch.uint8, device=device), 4)
        back = unpack_fields(offsets, z.numel(), 4)
        assert layout_of(z) == layout_of(gx) == layout
    assert mode.shape_env is not None and not mode.shape_env.guards
    n = 7 * 5 * 11 * 13
    assert [int(t.numel()) for t in (packed, gx, offsets, back)] == [(n + 7) // 8, n, (n + 1) // 2, n]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 255), max_size=70))
def test_fields_round_trip(width: int, values: list[int]) -> None:
    v = torch.tensor([n % 2**width for n in values], dtype=torch.uint8)
    packed = pack_fields(v, width)
    assert packed.numel() == math.ceil(len(values) * width / 8)
    assert torch.equal(packed, bits.pack_by_shifts(v, width))
    for back in (unpack_fields(packed, len(values), width), bits.unpack_by_shifts(packed, len(v), width)):
        assert torch.equal(back, v)
    assert bits.unpack_by_shifts(packed.to("meta"), len(v), width).device.type == "meta"


def test_packing_keeps_no_autograd_history() -> None:
    z = torch.randn(9, requires_grad=True)
    assert not pack_gate(z, 0.0, math.inf, False).requires_grad


@pytest.mark.parametrize("shape", [(3, 5, 7, 3), (2, 3, 4, 5, 3)])
@pytest.mark.parametrize("layout", [0, 1])
def test_gate_in_its_own_buffer(shape: tuple[int, ...], layout: int) -> None:
    z, g = laid_out(torch.randn(shape), layout), laid_out(torch.randn(shape), layout)
    packed, held = pack_gate(z, -0.5, 0.5, False), g.data_ptr()
    for inside, outside in FACTORS:
        got = g.clone(memory_format=torch.preserve_format)
        apply_gate_(got, packed, layout, inside, outside)
        assert torch.equal(got, apply_gate(g, packed, layout, inside, outside))
    apply_gate_(g, packed, layout, 1.0, 0.0)
    assert g.data_ptr() == held and not g[(z <= -0.5) | (z >= 0.5)].any()


def test_layouts_of_maps() -> None:
    z = torch.randn(2, 3, 4, 5)
    last = as_layout(z, 1)
    assert as_layout(z, 0) is z and torch.equal(last, z) and (layout_of(last), layout_of(z)) == (1, 0)
    assert dense_in(z, 0) and dense_in(last, 1) and not dense_in(z, 1) and not dense_in(last, 0)
    for like in (z.double(), last.double()):
        other = empty_like_map(like, [3, 6, 2, 2])
        assert other.shape == (3, 6, 2, 2) and other.dtype == torch.float64 and layout_of(other) == layout_of(like)
    assert empty_like_map(z.to("meta"), [1, 1, 1, 1]).device.type == "meta"


def parts_of(n: int, threads: bool) -> tuple[list[tuple[int, ...]], set[int]]:
    """Elements and bytes of each part in order, and the threads that had some."""
    seen: list[tuple[int, ...]] = []
    who: set[int] = set()

    def work(part: slice, where: slice) -> None:
        seen.append((part.start, part.stop, where.start, where.stop))
        who.add(threading.get_ident())

    bits.spread(n, work, threads)
    return sorted(seen), who


def test_parts_are_spread_over_threads_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "CPU_SEGMENT", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    want = [(0, 16, 0, 2), (16, 32, 2, 4), (32, 48, 4, 6), (48, 61, 6, 8)]
    seen, who = parts_of(61, True)
    assert seen == want and len(who) == 2
    seen, who = parts_of(61, False)
    assert seen == want and who == {threading.get_ident()}
    assert parts_of(13, True) == ([(0, 13, 0, 2)], {threading.get_ident()})


def test_a_fault_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "CPU_SEGMENT", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def work(part: slice, where: slice) -> None:
        if part.start == 16:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bits.spread(64, work, True)


@pytest.mark.parametrize("n", [15, 16, 17])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fakes_are_as_large_as_the_real_ones(n: int, device: str) -> None:
    real = torch.zeros(n)
    with FakeTensorMode():
        z, v = torch.empty(n, device=device), torch.empty(n, dtype=torch.uint8, device=device)
        made = [pack_gate(z, 0.0, 1.0, False), pack_fields(v, 2), unpack_fields(v, n, 1)]
    want = [pack_gate(real, 0.0, 1.0, False), pack_fields(real.byte(), 2), unpack_fields(real.byte(), n, 1)]
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in want]
    assert {t.device.type for t in made} == {device}


@pytest.mark.parametrize("layout", [0, 1])
def test_a_fake_gradient_lies_as_the_real_one(layout: int) -> None:
    with FakeTensorMode():
        packed = torch.empty(38, dtype=torch.uint8)
        for g in (torch.empty(2, 3, 5, 10), laid_out(torch.empty(2, 3, 5, 10), 1)):
            assert layout_of(apply_gate(g, packed, layout, 1.0, 0.0)) == layout


def test_symbolic_layouts_that_are_neither_or_both() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = [DimDynamic.DYNAMIC] * 4
    turned = torch.empty(11, 5, 7, 13).permute(2, 1, 0, 3)
    one = torch.empty(7, 1, 11, 13).as_strided((7, 1, 11, 13), (143, 1, 13, 1))
    for z, sizes in ((turned, dynamic), (one, [dynamic[0], DimDynamic.STATIC, *dynamic[2:]])):
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        assert layout_of(mode.from_tensor(z, symbolic_context=context)) == layout_of(z) == 0


@pytest.mark.parametrize("layout", [0, 1])
def test_another_device_takes_the_path_of_shifts(layout: int) -> None:
    """The functions behind the ops, on meta tensors: without values, but on no CPU."""
    z = laid_out(torch.empty(2, 3, 4, 5), layout).to("meta")
    packed = pack_gate._init_fn(z, 0.0, 1.0, False)
    gx = apply_gate._init_fn(z, packed, layout, 1.0, 0.0)
    apply_gate_._init_fn(gx, packed, layout, 0.3, 0.2)
    fields = pack_fields._init_fn(torch.empty(9, dtype=torch.uint8, device="meta"), 1)
    back = unpack_fields._init_fn(fields, 9, 1)
    assert [tuple(t.shape) for t in (packed, gx, fields, back)] == [(15,), (2, 3, 4, 5), (2,), (9,)]
    assert {t.device.type for t in (packed, gx, fields, back)} == {"meta"} and layout_of(gx) == layout


def test_memory_like_a_map() -> None:
    like = torch.randn(2, 3, 4, 5)
    for map_, layout, want in ((like, None, 0), (like, 1, 1), (laid_out(like, 1), None, 1), (laid_out(like, 1), 0, 0)):
        made = bits.empty_like_map(map_, (2, 6, 4, 5), layout)
        assert layout_of(made) == want and made.shape == (2, 6, 4, 5) and made.dtype == like.dtype
