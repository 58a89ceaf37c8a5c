"""Try a proof on the other side of the guards that it assumed about the batch size.

A guard such as B < 16 (a kernel choice) says that the symbolic run saw one side only. An exact fake run
with a batch on the other side must keep what the formulas say there; then nothing was assumed.
"""

from dataclasses import replace
from typing import Any

import sympy
from torch import Tensor

from floorplan.errors import TraceError
from floorplan.ledger.criterion import AT_FLOOR, UNPROVEN, Proof, evaluate
from floorplan.ledger.run import Step, Watch, run
from floorplan.torch_doors import tree_map

CANDIDATES = (3, 5, 17, 33, 65, 129)
B = sympy.Symbol("B", positive=True, integer=True)


def try_other_sides(step: Step, proof: Proof, ran: int) -> Proof:
    """The proof, with each batch assumption marked as tried, or kept as it stands.

    ran: the batch of the symbolic run. Where that lies on the other side, the exact run that agreed was the try.
    """
    said, verdict, asked = [], proof.verdict, proof.symbols.get("B", ran)
    for text in proof.assumptions:
        guard = _about_batch(text)
        other = None if guard is None else next((n for n in CANDIDATES if guard.subs(B, n) == sympy.false), None)
        if guard is not None and guard.subs(B, asked) == sympy.false:
            said.append(f"{~guard} (tried at B = {ran} too: the same tensors, the same formulas)")
        elif other is None:
            said.append(text)
        elif _agrees(step, proof, other):
            said.append(f"{text} (tried at B = {other} too: the same tensors, the same formulas)")
        else:
            said.append(f"{text}; at B = {other} other tensors are kept: check that batch by itself")
            verdict = UNPROVEN if verdict == AT_FLOOR else verdict
    return replace(proof, assumptions=tuple(said), verdict=verdict)


def _about_batch(text: str) -> Any:
    """An assumption about B alone as a relation; None for any other."""
    try:
        guard = sympy.sympify(text, locals={"B": B})
    except (sympy.SympifyError, SyntaxError, TypeError, AttributeError):
        return None
    return guard if isinstance(guard, sympy.core.relational.Relational) and guard.free_symbols == {B} else None


def _agrees(step: Step, proof: Proof, batch: int) -> bool:
    def resized(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim():
            return t
        return t.detach().new_empty((batch, *t.shape[1:])).requires_grad_(t.requires_grad)

    try:
        found = run(replace(step.forward, inputs=tree_map(resized, step.inputs)), Watch(hooks=True))
    except TraceError:
        return False
    exact = sum({s.storage: int(s.nbytes) for s in found.saved if s.owner == "kept"}.values())
    return evaluate(proof.kept, {**proof.symbols, "B": batch}) == exact
