"""Try a proof on the other side of the guards that it assumed about the batch size.

A guard such as B < 16 (a kernel choice) says that the symbolic run saw one side only. An exact fake run
with a batch on the other side must keep what the formulas say there; then nothing was assumed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from floorplan.errors import TraceError
from floorplan.ledger.criterion import AT_FLOOR, UNPROVEN, Proof, evaluate
from floorplan.ledger.run import Step, Watch, run
from floorplan.torch_doors import tree_map

CANDIDATES = (3, 5, 17, 33, 65, 129)
B = sympy.Symbol("B", positive=True, integer=True)


def try_other_sides(gm: fx.GraphModule, inputs: Sequence[Any], proof: Proof, autocast: torch.dtype | None) -> Proof:
    """The proof, with each batch assumption marked as tried, or kept as it stands."""
    said, verdict = [], proof.verdict
    for text in proof.assumptions:
        batch = _other_batch(text)
        if batch is None:
            said.append(text)
        elif _agrees(gm, inputs, proof, batch, autocast):
            said.append(f"{text} (tried at B = {batch} too: the same tensors, the same formulas)")
        else:
            said.append(f"{text}; at B = {batch} other tensors are kept: check that batch by itself")
            verdict = UNPROVEN if verdict == AT_FLOOR else verdict
    return replace(proof, assumptions=tuple(said), verdict=verdict)


def _other_batch(text: str) -> int | None:
    """A batch size for which an assumption about B alone is false."""
    try:
        guard = sympy.sympify(text, locals={"B": B})
    except (sympy.SympifyError, SyntaxError, TypeError, AttributeError):
        return None
    if getattr(guard, "free_symbols", None) != {B} or not isinstance(guard, sympy.core.relational.Relational):
        return None
    return next((n for n in CANDIDATES if guard.subs(B, n) == sympy.false), None)


def _agrees(gm: fx.GraphModule, inputs: Sequence[Any], proof: Proof, batch: int, autocast: torch.dtype | None) -> bool:
    def resized(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim():
            return t
        return t.detach().new_empty((batch, *t.shape[1:])).requires_grad_(t.requires_grad)

    step = Step(gm, tree_map(resized, tuple(inputs)), autocast=autocast)
    try:
        found = run(step.forward, Watch(hooks=True))
    except TraceError:
        return False
    exact = sum({s.storage: int(s.nbytes) for s in found.saved if s.owner == "kept"}.values())
    return evaluate(proof.kept, {**proof.symbols, "B": batch}) == exact
