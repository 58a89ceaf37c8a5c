"""`floorplan merge`: an adapted.pt as a plain model, or as a state_dict of its source model.

conv -> BatchNorm with an adapter on conv   ->   conv.weight + U o P, before the BatchNorm

What was folded stays as the source has it; what stayed a layer of torch (a trained head, the
statistics that a BatchNorm gathered) is taken from the adapted model. Either file is compared with
the adapted model, and read back, before it gets its name.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, first_line
from floorplan.files import ensure_writable, whole
from floorplan.layers.adapter import adapters
from floorplan.layers.fused import FusedConv
from floorplan.layers.layer import Layer
from floorplan.ledger.inputs import shapes_of, smaller_inputs
from floorplan.methods.merge import difference, merge_verified, refuse_unmergeable
from floorplan.methods.merge_branch import branch_pairs
from floorplan.methods.plain import delta_of
from floorplan.methods.subject import Source, loaded, read_adapted, subject_of
from floorplan.methods.verify import runs_in_double, same_outputs, to_double
from floorplan.store.artifact import save_artifact
from floorplan.store.modules import packages_of
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


def merge_file(
    adapted: str, output: str | Path, into: Source | None = None, force: bool = False, allow: Sequence[str] = ()
) -> str:
    """Merge the file `adapted` into `output`; returns the line that says so.

    into: a model whose state_dict is written instead of a graph. allow: packages whose layers the file may name.
    """
    target = ensure_writable(output, force)
    subject = subject_of(Source(adapted, batch=2, allow=allow))
    refuse_unmergeable(subject.model)
    gm = cast(fx.GraphModule, subject.model)
    inputs = smaller_inputs(gm, subject.inputs)
    with whole(target) as draft:
        far = _write_state(gm, loaded(into).module, inputs, draft) if into else _write_graph(gm, inputs, draft)
    what = f" into a state_dict of {into.model}" if into else ""
    return f"wrote {target}: {len(adapters(gm))} convs merged{what}, largest relative difference {far}"


def _write_graph(gm: fx.GraphModule, inputs: Sequence[Any], draft: Path) -> str:
    merged = merge_verified(gm, inputs)
    plain = merged.module.eval()
    plain.meta["floorplan"].setdefault("input", shapes_of(inputs))
    save_artifact(plain, draft, plain.meta["floorplan"], force=True)
    same_outputs(plain, read_adapted(draft, packages_of(plain)), inputs, str(draft))
    exact = "" if merged.exact is None else f"{merged.exact:.1e} in float64, "
    return f"{exact}{merged.rounded:.1e} in its own precision"


def _write_state(gm: fx.GraphModule, source: nn.Module, inputs: Sequence[Any], draft: Path) -> str:
    state = delta_state(gm, source)
    dtypes = [t.dtype for t in state.values() if t.is_floating_point()]
    source.load_state_dict(state)
    twin, where = gm, "its own precision"
    if not (runs_in_double(gm, inputs) or runs_in_double(cast(Any, source), inputs)):
        twin, source, where = copy.deepcopy(gm).double(), source.double(), "float64"
        inputs = to_double(inputs)
    far = difference(twin, source, inputs)
    # The weights were rounded when a BatchNorm was folded into them: the same as rewrite allows.
    allowed = 2000 * max((torch.finfo(d).eps for d in dtypes), default=0.0)
    if not far <= allowed:
        what = f"the model with these weights differs from the adapted one by {far:.1e} (allowed {allowed:.0e})"
        raise FloorplanError(f"merge: {what}; name the model, and the weights, that were adapted")
    _save_tensors(state, draft)
    return f"{far:.1e} in {where}"


def _save_tensors(state: dict[str, Tensor], draft: Path) -> None:
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        again = torch.load(draft, weights_only=True)
    except (OSError, RuntimeError) as e:
        raise FloorplanError(f"{draft}: cannot be written: {first_line(e)}") from e
    pairs = [(again.get(k), t) for k, t in state.items()]
    same = again.keys() == state.keys() and all(a.dtype == b.dtype for a, b in pairs)
    if not same or not all(torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num()) for a, b in pairs):
        raise FloorplanError(f"{draft}: does not read back as written; check the disk")
