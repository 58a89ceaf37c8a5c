"""Does a rewritten graph stand for other batches than the one that was traced?"""

import copy
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import ReadsValues, TraceError, describe
from floorplan.ledger.inputs import reads_places
from floorplan.ledger.run import Step, run
from floorplan.methods.verify import Mismatch, same_start, start_of
from floorplan.torch_doors import tensors_in, tree_map


def any_batch(after: fx.GraphModule, before: nn.Module, inputs: Sequence[Any]) -> str:
    """The first other batch that the source takes and the graph does not, and where; "" if there is none.

    A number that the forward made of its batch size is a constant in the graph: right for the batch traced alone.
    """
    had = next((t.shape[0] for t in tensors_in(tuple(inputs)) if t.dim()), 0)
    for batch in [had + 1, 1][: 1 if had == 1 or reads_places(after) else 2] if had else []:
        given = tree_map(lambda t, n=batch: _rows(t, had, n), tuple(inputs))
        try:
            want = start_of(before, given)
        except Exception:  # whatever it raises, it takes no such batch itself
            continue
        try:
            with redirect_stderr(StringIO()):  # torch prints the generated line at which a graph fails
                same_start(after, before, given, want)
        except Mismatch as e:
            return f"at batch {batch} it computes something else ({e})"
        except Exception as e:  # whatever the graph raises where the source does not
            return f"at batch {batch}, {_where(copy.deepcopy(after).eval(), given) or describe(e)}"
    return ""


def _rows(t: Any, had: int, batch: int) -> Any:
    """The rows of a tensor of `had` rows again and again, `batch` of them; anything else as it is."""
    return t[torch.arange(batch) % had] if isinstance(t, Tensor) and t.dim() and t.shape[0] == had else t


def _where(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The node at which a graph fails on fakes, with its line in the user's code; "" if none does."""
    try:
        run(Step(gm, tuple(inputs)).forward)
    except ReadsValues:
        return ""
    except TraceError as e:
        node, _, said = str(e).partition(": ")
        line = next((n.meta.get("line") for n in gm.graph.nodes if n.name == node), None)
        said = said.removesuffix("; give sizes that fit with --input")
        return f"{node} ({line}): {said}" if line else str(e)
    return ""
