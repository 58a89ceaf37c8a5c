"""`floorplan merge`: an adapted.pt as a plain model, or as a state_dict of its source model.

Either file is compared with the adapted model, and read back, before it gets its name.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.files import ensure_writable, whole
from floorplan.layers.adapter import adapters
from floorplan.ledger.inputs import smaller_inputs
from floorplan.methods.merge import difference, merge_verified, refuse_unmergeable
from floorplan.methods.merge_state import delta_state
from floorplan.methods.subject import Source, loaded, read_adapted, subject_of
from floorplan.methods.verify import double_copy, runs_in_double, same_outputs, to_double
from floorplan.store.artifact import save_artifact
from floorplan.store.modules import packages_of
from floorplan.text import first_line


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
    plain.meta["floorplan"].setdefault("input", [list(t.shape) for t in inputs])
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
        twin, source, where = double_copy(gm), source.double(), "float64"
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
