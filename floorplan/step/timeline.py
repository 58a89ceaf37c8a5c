"""The timeline of a compiled step: on fake tensors before anything runs, or of a real run; block by block the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from floorplan.layers.layer import model_state
from floorplan.ledger import run as ledger
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.losses import faked, ungraded, weights_of
from floorplan.ledger.storage import StorageTracker, bytes_of_tensors
from floorplan.step.compile import Step
from floorplan.step.guard import refuse_unsplit
from floorplan.step.runner import Runner
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.timeline.run import apart, timeline_of


def predict(step: Step, inputs: Sequence[Any], target: Any, few: bool = False) -> StepTimeline:
    """Every storage of the step at these sizes, from one run on fake tensors; values are not read.

    few: of alike micro-batches only those are run that can be the fullest.
    """
    return _seen(step, step.program.gm, inputs, target, few)


def measure(step: Step, inputs: Sequence[Any], target: Any) -> StepTimeline:
    """The same of a real step; buffers, gradients and the random state are put back."""
    return _seen(step, step.module, inputs, target)


def _seen(step: Step, model: nn.Module, inputs: Sequence[Any], target: Any, few: bool | None = None) -> StepTimeline:
    """few: of a run on fakes; None: a real one."""
    fake = few is not None
    weights, n = weights_of(step.loss), len(inputs)

    def drive(model: nn.Module, given: tuple[Any, ...], tracker: StorageTracker) -> Any:
        refuse_unsplit(step, given[:n], given[-1])  # as the first call does
        loss = faked(step.loss, given[n:-1]) if fake else step.loss
        runner: Runner = step.bound(model, tracker.enter, loss).__self__  # type: ignore[attr-defined]
        out = replace(runner, few=bool(few)).step(given[:n], given[-1])
        tracker.enter("", "optimizer")
        return out

    driven = ledger.Step(model, (*inputs, *weights), target, drive=drive)
    fakes = concrete_fakes(model, driven.given) if fake else False
    if not isinstance(fakes, bool):
        fakes.mode.allow_non_fake_inputs = True  # a loss of the user's has weights of its own
    with ungraded(step.loss):
        seen = ledger.run(driven, fake=fakes)
    trained = bytes_of_tensors([t for t in model_state(model) if t.requires_grad])
    found = timeline_of(seen, str(step.schedule), apart(replace(driven, inputs=tuple(inputs)), 2 * trained))
    return replace(found, blocks=tuple(_with_role(b, found.blocks) for b in found.blocks))


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
    ends = [visits[b.died] if b.died < len(visits) else -1 for b in timeline.blocks]
    all_ = zip(timeline.blocks, visits, ends, strict=True)
    lasting = tuple(b for b, visit, end in all_ if end != visit or b.role != "temporary")
    return replace(timeline, blocks=lasting).peak
