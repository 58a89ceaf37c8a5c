"""The timeline of a compiled step: on fake tensors before anything runs, or of a real run; block by block the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from floorplan.graph.untouched import undisturbed
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.kernels import quiet_fakes
from floorplan.step.compile import Step
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.timeline.run import call_timeline
from floorplan.trees import bytes_of_tensors, model_state, tensors_in


def predict(step: Step, inputs: Sequence[Any], target: Tensor) -> StepTimeline:
    """Every storage of the step at these sizes, from one run on fake tensors; values are not read."""
    fakes = concrete_fakes(step.program.gm, (*inputs, target))
    with quiet_fakes(), fakes.mode:
        return _tracked(step, fakes.gm, fakes.inputs)


def measure(step: Step, inputs: Sequence[Any], target: Tensor) -> StepTimeline:
    """The same of a real step; buffers, gradients and the random state are put back."""
    with undisturbed(step.module):
        return _tracked(step, step.module, (*inputs, target))


def _tracked(step: Step, model: Any, given: Sequence[Any]) -> StepTimeline:
    state = model_state(model)
    for t in state:
        t.grad = None

    def run(enter: Any) -> Any:
        out = step.bound(model, enter)(given[:-1], given[-1])
        enter("", "optimizer")
        return out

    found = call_timeline(
        run,
        [*state, *tensors_in(tuple(given))],
        name=str(step.schedule),
        gradients=lambda: [t.grad for t in state if t.grad is not None],
    )
    for t in state:
        t.grad = None
    trained = bytes_of_tensors([t for t in state if t.requires_grad])
    apart = (
        ("model", bytes_of_tensors(state)),
        ("optimizer", 2 * trained),
        ("batch", bytes_of_tensors(list(tensors_in(tuple(given))))),
    )
    return replace(found, state=apart, blocks=tuple(_with_role(b, found.blocks) for b in found.blocks))


def _with_role(b: Block, blocks: Sequence[Block]) -> Block:
    """A block with its pillar, if the forward leaves it for the backward: packed gates, bottlenecks, whole maps."""
    ends = blocks[b.died].direction if b.died < len(blocks) else "optimizer"
    if b.role != "temporary" or b.direction != "forward" or ends not in ("backward", "optimizer"):
        return b
    return replace(b, role="gate" if b.dtype == "uint8" else "adapter" if b.op in _BOTTLENECKS else "other")


_BOTTLENECKS = ("aten.mm.default", "aten.bmm.default", "aten.convolution.default")


def whole_op_bound(timeline: StepTimeline) -> int:
    """Bytes that the step needs at least as long as ops run whole: what it would hold without temporaries.

    A temporary is a storage that is born and dies while one node runs: merged weights, padded copies,
    parts of a sum. What is left is kept state, gradients, and whole inputs and outputs of the running op.
    """
    visits, visit = [], 0
    for before, b in zip((None, *timeline.blocks), timeline.blocks, strict=False):
        visit += before is not None and (before.node, before.direction) != (b.node, b.direction)
        visits.append(visit)
    lasting = tuple(
        b
        for b, v in zip(timeline.blocks, visits, strict=True)
        if b.died >= len(visits) or visits[b.died] != v or b.role != "temporary"
    )
    return replace(timeline, blocks=lasting).peak
