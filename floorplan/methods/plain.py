"""A layer's plain form in torch's own layers, merged in float64 and rounded once."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from floorplan.layers.geometry import CONVS, TRANSPOSED, Geometry
from floorplan.layers.layer import Adapter, Layer, Plain


def exact(layer: nn.Module) -> Any:
    """A float64 twin on the CPU, which every device can copy from."""
    return copy.deepcopy(layer).to("cpu", torch.float64)


def delta_of(layer: Adapter) -> Tensor:
    """What the adapter adds to the weight of the source's conv, in float64 on the CPU."""
    delta: Tensor = exact(layer).source_delta()
    return delta.detach()


def plain_form(layer: nn.Module) -> Plain | None:
    """What a layer says of itself, computed in float64; None for a layer that stays as it is."""
    form: Plain | None = exact(layer).plain_form() if isinstance(layer, Layer) else None
    if not isinstance(form, nn.Module):
        return form
    for p in form.parameters():
        p.data = like(layer, p)
    return form.train(layer.training)


def like(layer: nn.Module, t: Tensor) -> Tensor:
    """A tensor of a plain form in the layer's dtype, on its device."""
    own = next(p for p in (*layer.parameters(), *layer.buffers()) if p.is_floating_point())
    return t.detach().to(device=own.device, dtype=own.dtype)


def explicit_padding(geo: Geometry) -> bool:
    """Whether no layer of torch pads so: both sides of an axis differ."""
    return any(lo != hi for lo, hi in geo.padding)


def plain_conv(geo: Geometry, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
    """The conv of that geometry on these very tensors; unpadded if it needs explicit padding."""
    kind: Any = (TRANSPOSED if geo.transposed else CONVS)[len(geo.kernel) - 1]
    inputs, outputs = weight.shape[1] * geo.groups, weight.shape[0]
    options: dict[str, Any] = {"stride": geo.stride, "dilation": geo.dilation, "groups": geo.groups}
    if geo.transposed:
        inputs, outputs = outputs, inputs
        options["output_padding"] = geo.output_padding
    if not explicit_padding(geo):
        options["padding"] = tuple(lo for lo, _ in geo.padding)
        options["padding_mode"] = geo.mode if any(options["padding"]) else "zeros"
    with torch.device("meta"):
        conv = kind(inputs, outputs, geo.kernel, bias=bias is not None, **options)
    conv.weight, conv.bias = weight, bias
    return cast(nn.Module, conv)
