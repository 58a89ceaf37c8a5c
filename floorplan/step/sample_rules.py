"""One table: what an op does to the axis of samples. Every op of a forward has its rule here, or is tried.

A value's samples lie along one axis, each in as many neighbouring rows. A rule says why an op breaks that, or "".
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from floorplan.torch_doors import tree_iter


@dataclass(frozen=True)
class Value:
    """A tensor in an op's arguments or results, by its shape."""

    shape: tuple[int, ...]

    @staticmethod
    def of(t: Tensor) -> "Value":
        """Of a tensor."""
        return Value(tuple(t.shape))


@dataclass(frozen=True)
class Op:
    """One op of a forward: arguments by name, results, and the state of the model that it writes to."""

    name: str
    where: str
    given: dict[str, Any]
    made: Sequence[Value]
    pointwise: bool
    writes: str


@dataclass(frozen=True)
class Samples:
    """A value with its axis of samples; None: it has none."""

    shape: tuple[int, ...]
    axis: int | None

    @property
    def behind(self) -> int:
        """The axis, counted from the end."""
        assert self.axis is not None
        return self.axis - len(self.shape)


@dataclass(frozen=True)
class Seen:
    """An op with axes: `ins` are all tensors that it reads, `outs` what it makes."""

    op: Op
    ins: list[Samples]
    outs: list[Samples]

    @property
    def rows(self) -> list[Samples]:
        """What it reads of samples."""
        return [v for v in self.ins if v.axis is not None]

    def at(self, name: str) -> Samples | None:
        """The tensor that is passed under a name."""
        value = self.op.given.get(name)
        of = [v for v in tree_iter(self.op.given) if isinstance(v, Value)]
        return next((s for s, v in zip(self.ins, of, strict=True) if v is value), None)


Rule = Callable[[Seen], str]


UNSURE = "may take samples together"
_OVER, _MIXED = "over the samples of the batch", "takes samples together"


def _aligned(s: Seen) -> str:
    """Every value has its samples where the result has them."""
    out = s.outs[0]
    same = all(v.behind == out.behind and v.shape[v.axis or 0] == out.shape[out.axis or 0] for v in s.rows)
    return "" if same else _MIXED


def _along(*names: str) -> Rule:
    """An op along given dimensions, of which the samples are none; without any it takes all."""

    def rule(s: Seen) -> str:
        dims = next((s.op.given[n] for n in names if s.op.given.get(n) is not None), None)
        dims = [dims] if isinstance(dims, int) else dims
        if not dims:
            return _OVER
        bad = any(v.axis in [d % len(v.shape) for d in dims] for v in s.rows)
        return _OVER if bad or len({v.axis for v in s.rows}) > 1 else ""

    return rule


def _squeezed(s: Seen) -> str:
    """Without dimensions it takes the samples' axis where a part has one sample."""
    return _along("dim")(s) if s.op.given.get("dim") is not None else UNSURE


def _picked(s: Seen) -> str:
    """gather and scatter: along another dimension, with indices for every sample."""
    whole = [v for v in s.ins if v.shape]
    return _along("dim")(s) or ("" if all(v.axis is not None for v in whole) else UNSURE)


def _sliced(s: Seen) -> str:
    x, g = s.ins[0], s.op.given
    if x.axis is None or x.axis != g["dim"] % len(x.shape):
        return ""
    whole = not g["start"] and (g["end"] is None or g["end"] >= x.shape[x.axis]) and g["step"] == 1
    return "" if whole else "takes some samples of the batch"


def _selected(s: Seen) -> str:
    """index_select and embedding: rows of a table by the samples' own numbers, or other rows of every sample."""
    table, index = s.ins[0], s.at("index") or s.at("indices")
    if index is None or index.axis is not None:
        return "" if table.axis is None else UNSURE
    return _along("dim")(s) if "dim" in s.op.given else _MIXED


def _indexed(s: Seen) -> str:
    x, indices = s.ins[0], s.op.given["indices"]
    if x.axis is None:
        return "" if len({v.behind for v in s.rows}) == 1 else UNSURE
    fixed = len(s.rows) == 1 and (x.axis >= len(indices) or indices[x.axis] is None)
    return "" if fixed else UNSURE


def _viewed(s: Seen) -> str:
    """Rows of a sample stay neighbours if as many elements lie in front of the samples."""
    x, out = s.rows[0], s.outs[0]
    return "" if prod(x.shape[: x.axis]) == prod(out.shape[: out.axis]) else "mixes samples with other sizes"


def _product(s: Seen) -> str:
    """Matrix products: samples are rows or columns, or there is a product for each."""
    a, b = s.ins[-2:]
    if a.axis is not None and b.axis is not None:
        return "" if len(a.shape) == 3 and a.axis == b.axis == 0 else _MIXED
    rows = a.axis not in (None, len(a.shape) - 1) or b.axis not in (None, max(len(b.shape) - 2, 0))
    bias = all(v.behind == s.outs[0].behind for v in s.ins[:-2] if v.axis is not None)
    return "" if rows and bias else _MIXED


def _first(s: Seen) -> str:
    """Convolutions and layers: samples in front of the map, and nowhere else."""
    x, *more = s.ins
    apart = all(v.axis is None or s.op.name.startswith("layer") for v in more)
    return "" if apart and all(v.axis == 0 for v in s.rows) and s.outs[0].axis == 0 and x.axis == 0 else UNSURE


def _positions(s: Seen) -> str:
    """Pools, resampling and padding: samples are no position."""
    count = re.search(r"(\d)d", s.op.name)
    nd = int(count[1]) if count else 3 if s.op.name.startswith(("pixel", "channel")) else 2
    return "" if all(v.axis is not None and v.axis < len(v.shape) - nd for v in s.rows) else UNSURE


def _padded(s: Seen) -> str:
    x, width = s.rows[0], len(s.op.given["pad"]) // 2
    return "" if (x.axis or 0) < len(x.shape) - width else _MIXED


def _layer_norm(s: Seen) -> str:
    x, n = s.ins[0], len(s.op.given["normalized_shape"])
    return "" if x.axis is not None and x.axis < len(x.shape) - n else "normalises over the samples of the batch"


def _batch_norm(s: Seen) -> str:
    x, of = s.ins[0], s.op.given
    if of.get("training", of.get("train", "no_training" not in s.op.name)) and x.axis != 1:
        return "normalises by the batch"
    apart = s.at("running_mean") is None or x.axis != 1
    return "" if apart else UNSURE


def _attention(s: Seen) -> str:
    return "" if all(v.axis == 0 for v in s.rows) and all(v.axis == 0 for v in s.ins[:3]) else UNSURE


def _free(s: Seen) -> str:
    return ""


_TABLE: tuple[tuple[Rule, str], ...] = (
    (
        _aligned,
        """clone _to_copy contiguous detach alias lift_fresh lift_fresh_copy copy fill zero expand repeat where prelu
        empty_like zeros_like ones_like full_like rand_like randn_like bernoulli uniform normal exponential dropout
        native_dropout masked_fill rrelu_with_noise _conj view_as_real view_as_complex _prelu_kernel layer,pointwise""",
    ),
    (
        _along("dim", "dims", "dimension"),
        """sum mean amax amin max min prod var std var_mean std_mean argmax argmin any all logsumexp norm nansum cumsum
        linalg_vector_norm cumprod cummax cummin logcumsumexp softmax log_softmax _softmax _log_softmax sort topk
        kthvalue median nanmedian mode
        argsort aminmax count_nonzero unbind unsafe_split split split_with_sizes chunk cat glu
        select unfold index_fill roll flip _fft_r2c _fft_c2c _fft_c2r""",
    ),
    (_squeezed, "squeeze"),
    (_picked, "gather scatter scatter_add scatter_reduce"),
    (_sliced, "slice"),
    (_selected, "index_select embedding"),
    (_indexed, "index _unsafe_index"),
    (_viewed, "view _unsafe_view reshape _reshape_alias"),
    (_free, "permute transpose t unsqueeze stack"),
    (_product, "mm bmm addmm baddbmm mv addmv"),
    (_first, "convolution _convolution mkldnn_convolution native_group_norm im2col col2im layer"),
    (
        _positions,
        """avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices max_pool1d max_pool2d
        max_pool3d mkldnn_max_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_max_pool2d
        adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d
        _upsample_bicubic2d_aa upsample_trilinear3d reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d grid_sampler_3d max_unpool2d
        fractional_max_pool2d pixel_shuffle pixel_unshuffle channel_shuffle tril triu""",
    ),
    (_padded, "constant_pad_nd"),
    (_layer_norm, "native_layer_norm _fused_rms_norm"),
    (
        _batch_norm,
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update
        cudnn_batch_norm miopen_batch_norm""",
    ),
    (
        _attention,
        """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
        _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention""",
    ),
)
_RULES = {name: rule for rule, names in _TABLE for name in names.split()}
# Alike for every sample, or drawn for each.
FRESH = set("zeros ones full empty empty_strided new_empty new_zeros new_ones new_full new_empty_strided".split())
FRESH |= set("rand randn randint scalar_tensor empty_permuted".split())
SHUFFLES = ("randperm",)
# Results beside the first that hold no samples: statistics that eval mode leaves empty, seeds of attention.
ASIDE = set("_native_batch_norm_legit_no_training native_batch_norm cudnn_batch_norm".split())
ASIDE |= set("_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention".split())


def rule_of(op: Op) -> Rule | None:
    """The rule of an op, its in-place form or one that works on every element alone; None: it has none."""
    return _aligned if op.pointwise else _RULES.get(op.name, _RULES.get(op.name.removesuffix("_")))
