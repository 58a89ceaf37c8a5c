"""The adapters of a graph as a state_dict of the model that it was made from.

conv -> BatchNorm with an adapter on conv   ->   conv.weight + U o P, before the BatchNorm

What was folded stays as the source has it; what stayed a layer of torch (a trained head, the
statistics that a BatchNorm gathered) is taken from the adapted model.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapters
from floorplan.layers.fused import FusedConv
from floorplan.layers.layer import Layer
from floorplan.methods.merge import refuse_unmergeable
from floorplan.methods.merge_branch import branch_pairs
from floorplan.methods.plain import delta_of
from floorplan.torch_doors import tensors_of


class _State:
    """A state_dict of the source; what is written under one name of a tensor goes to all of them."""

    def __init__(self, source: nn.Module) -> None:
        live = source.state_dict(keep_vars=True)
        if bad := next((k for k, t in live.items() if not isinstance(t, Tensor)), ""):
            raise FloorplanError(f"merge: {bad} of the source is no tensor; no state_dict of tensors fits it")
        self.tensors = {k: t.detach().clone() for k, t in live.items()}
        self._ids = {k: id(t) for k, t in live.items()}
        self._names: dict[int, list[str]] = {}
        for key, name in self._ids.items():
            self._names.setdefault(name, []).append(key)
        self._adapted: dict[int, str] = {}

    def fits(self, key: str, like: Tensor) -> bool:
        """Whether the source has a tensor of that name and shape."""
        return key in self.tensors and self.tensors[key].shape == like.shape

    def put(self, key: str, value: Tensor) -> None:
        """Replace a tensor, in the source's dtype, on its device."""
        new = value.detach().to(self.tensors[key], copy=True)
        for name in self._names[self._ids[key]]:
            self.tensors[name] = new

    def add(self, path: str, layer: nn.Module, delta: Tensor) -> None:
        """Add to the weight of the conv at `path`, which is `layer` in the adapted model."""
        key = f"{path}.weight"
        if not self.fits(key, delta):
            lost = f"the source has no {key} of shape {list(delta.shape)}"
            raise FloorplanError(f"merge: {lost}; name the model that was adapted, or merge without it")
        first = self._adapted.setdefault(self._ids[key], path)
        if first != path:
            two = f"{first} and {path} share one weight in the source but have adapters of their own"
            raise FloorplanError(f"merge: {two}; merge without it")
        if _scale_is_lost(layer, self.tensors[key]):
            way = "name the model, and the weights, that were adapted (none fits memflora-noscale)"
            raise FloorplanError(f"merge: {path} has another weight in the source than it was adapted with; {way}")
        self.put(key, self.tensors[key].to("cpu", torch.float64) + delta)


def _scale_is_lost(layer: nn.Module, weight: Tensor) -> bool:
    """Whether a site holds a folded weight but not the factor by which it was folded."""
    if type(layer) is not FusedConv or layer.scale is not None or not layer.rank:
        return False
    return not torch.equal(layer.weight, weight.to(layer.weight))


def delta_state(module: fx.GraphModule, source: nn.Module) -> dict[str, Tensor]:
    """A state_dict for the source model with which, in eval mode, it equals the adapted graph.

    New tensors in its dtype. FloorplanError if an adapter does not merge, or what was trained has no place in it.
    """
    refuse_unmergeable(module)
    state = _State(source)
    for path, m in module.named_modules():
        if not isinstance(m, Layer):
            _take(state, path, m)
    for path, layer, delta in _deltas(module):
        state.add(path, layer, delta)
    return state.tensors


def _take(state: _State, path: str, m: nn.Module) -> None:
    """The tensors of a layer that no pass replaced."""
    for name, t in tensors_of(m).items():
        key = f"{path}.{name}" if path else name
        if t is not None and state.fits(key, t):
            state.put(key, t)
        elif t is not None and t.requires_grad:
            raise FloorplanError(f"merge: {key} trains, but the source has no such tensor; merge without it")


def _deltas(gm: fx.GraphModule) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Path and layer of a conv, and what is added to its weight, once for each pair of factors."""
    seen: set[int] = set()  # the calls of one conv are sites of their own on the same factors
    beside = {str(p.branch.target): str(p.base.target) for p in reversed(list(branch_pairs(gm)))}
    for path, m in adapters(gm):
        factor = id(next(m.parameters()))
        if factor in seen:
            continue
        seen.add(factor)
        path = beside.get(path, path)
        yield path, gm.get_submodule(path), delta_of(m)
