"""The functions and methods that an adapted.pt graph may call: an allow-list, never a prefix.

A name found here is the only way from the text in a file to a callable. The torch functions are
those that torch itself lists as overridable, looked up in five public namespaces; everything else
is spelled out below.
"""

import builtins
import collections
import importlib
import math
import operator
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from floorplan.errors import FloorplanError, LoadError, short
from floorplan.layers.records import record_name, record_named
from floorplan.torch_doors import OPS, op_names

Target = Callable[..., Any]

# Kernels of one vendor that read packed weights or workspaces which they do not check.
_VENDOR = ("fbgemm_", "miopen_", "cudnn_", "mkldnn_", "quantized_")

_TORCH = """zeros ones full empty arange linspace logspace eye tensor as_tensor scalar_tensor rand
randn randint randperm tril_indices triu_indices broadcast_shapes result_type promote_types relu_
rrelu_ selu_ celu_ threshold_ dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_
sigmoid_ tanh_ exp_ sqrt_ abs_ neg_ clamp_ square_ rsqrt_ zero_ _assert""".split()

_FUNCTIONAL = """hardswish hardsigmoid logsigmoid sigmoid tanh relu_ leaky_relu_ elu_ hardtanh_
selu_ celu_ rrelu_ threshold threshold_ upsample""".split()

_OPERATOR = """add sub mul truediv floordiv mod pow matmul neg pos abs invert and_ or_ xor lshift
rshift not_ truth is_ is_not eq ne lt le gt ge getitem setitem contains concat index iadd isub imul
itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift""".split()

_BUILTINS = "getattr len abs max min round sum int float bool".split()

_MATH = "floor ceil trunc sqrt prod pow exp log log2 log10 fabs gcd isqrt".split()

_DETECTION = """nms batched_nms box_area box_convert box_iou clip_boxes_to_image complete_box_iou distance_box_iou
generalized_box_iou masks_to_boxes remove_small_boxes roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d
sigmoid_focal_loss complete_box_iou_loss distance_box_iou_loss generalized_box_iou_loss drop_block2d
drop_block3d""".split()

_ZOO = {  # leaf functions of other packages, imported only when a graph names them
    **{f"torchvision.ops.{name}": "torchvision.ops" for name in _DETECTION},
    "torchvision.ops.stochastic_depth": "torchvision.ops",
    "timm.layers.drop_path": "timm.layers",
    "timm.layers.pad_same": "timm.layers",
}

_NAMESPACES = ("aten", "prims", "floorplan")

# Attributes that the traced `x.shape` and kin may read.
ATTRIBUTES = frozenset("shape dtype device ndim T mT H mH is_cuda requires_grad".split())

# Raw memory, hooks, other processes, Python callables: not what a forward pass needs.
_DENIED = frozenset(
    """apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook numpy
    share_memory_ set_ set set_data storage untyped_storage storage_type data_ptr const_data_ptr new
    module_load as_subclass record_stream reinforce retain_grad resize resize_ resize_as resize_as_
    resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ from_file is_shared""".split()
)


@cache
def _functions() -> dict[str, Target]:
    """Every allowed function by its qualified name; aliases share one object."""
    known = {id(f) for fs in torch.overrides.get_overridable_functions().values() for f in fs}
    table: dict[str, Target] = {}
    for space in (torch.nn.functional, torch, torch.linalg, torch.fft, torch.special):
        for name, f in sorted(vars(space).items()):
            if id(f) in known and callable(f) and not isinstance(f, type):
                if not name.startswith(("_", *_VENDOR)) and name not in _DENIED:
                    table[f"{space.__name__}.{name}"] = f
    listed = [(torch, _TORCH), (torch.nn.functional, _FUNCTIONAL), (operator, _OPERATOR)]
    listed += [(builtins, _BUILTINS), (math, _MATH), (collections, ["OrderedDict"])]
    for module, names in listed:
        table.update({f"{module.__name__}.{n}": getattr(module, n) for n in names})
    return table


@cache
def _names() -> dict[int, str]:
    return {id(f): name for name, f in reversed(_functions().items())}


@cache
def methods() -> frozenset[str]:
    """Public torch.Tensor methods that compute something; properties are not among them."""
    names = (n for n in dir(torch.Tensor) if not n.startswith("_") and n not in _DENIED)
    return frozenset(n for n in names if callable(getattr(torch.Tensor, n)))


def _registered(name: str) -> Any | None:
    """The registered op of an allowed namespace called `torch.ops.NS.NAME[.OVERLOAD]`, or None."""
    _, _, space, *rest = name.split(".")
    if space not in _NAMESPACES or len(rest) not in (1, 2) or any(p[:2] == "__" for p in rest):
        return None
    if rest[0] in _DENIED or not all(p.isascii() and p.isidentifier() for p in rest):
        return None
    key = f"{space}::{rest[0]}"
    keys = {key, f"{key}.{rest[-1]}"} if len(rest) == 2 else {key}
    if not any(k in keys or (len(rest) == 1 and k.split(".")[0] == key) for k in op_names()):
        return None
    packet = getattr(getattr(torch.ops, space), rest[0])
    op = getattr(packet, rest[1]) if len(rest) == 2 else packet
    private = space == "aten" and rest[0].startswith("_")
    if private and torch.Tag.core not in getattr(op, "tags", ()):
        return None
    return op


def leaf_functions() -> list[Target]:
    """The functions of other packages that a graph calls as they are, of those packages that are imported."""
    drop_path = getattr(sys.modules.get("timm.layers"), "drop_path", None)
    return [*detection_ops(), *([drop_path] if drop_path is not None else [])]


def detection_ops() -> list[Target]:
    """The functions of torchvision.ops that a graph calls as they are; none where nothing has imported it."""
    ops = sys.modules.get("torchvision.ops")
    return [getattr(ops, name) for name in _DETECTION if hasattr(ops, name)]


def name_of(target: Target, where: str) -> str:
    """The name under which a file stores a called function; FloorplanError if it may not."""
    zoo = (n for n, m in _ZOO.items() if getattr(sys.modules.get(m), n.rpartition(".")[2], None) is target)
    name = _names().get(id(target)) or next(zoo, None) or record_name(target)
    if isinstance(target, OPS) and _registered(f"torch.ops.{target}") is target:
        name = f"torch.ops.{target}"
    if name is None:
        called = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"
        raise FloorplanError(
            f"{where}: calls {called}, which is not on the list of functions that adapted.pt may"
            " name; write it with torch functions, or leave that part out of the rewrite"
        )
    return name


def function_named(name: str, where: str) -> Target:
    """The function stored as `name`; LoadError if it is not on the allow-list."""
    target = _functions().get(name) or record_named(name, where)
    if target is None and name.startswith("torch.ops."):
        target = _registered(name)
    if target is None and name in _ZOO:
        try:
            target = getattr(importlib.import_module(_ZOO[name]), name.rpartition(".")[2])
        except Exception as e:  # a torchvision that does not fit this torch raises RuntimeError
            package = name.partition(".")[0]
            raise LoadError(f"{where}: needs {package}; install it and load again") from e
    if target is None or not callable(target):
        raise LoadError(f"{where}: target {short(name)} is not on the allow-list; refused")
    return target
