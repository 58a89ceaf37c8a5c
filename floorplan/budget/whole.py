"""A loss that sees the outputs of a whole batch, on fakes of them: what it takes between the two passes of a step.

WholeLoss(step, fakes, given)    learns from one forward what the model returns
.at(n)                           the loss of n samples and its gradients: bytes need not grow in a line
.seeds                           the gradients of few samples: the second pass starts from such
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from floorplan.budget.work import Work, Worked
from floorplan.cost_models.peaks import Whole
from floorplan.errors import FloorplanError, first_line
from floorplan.ledger import run as ledger
from floorplan.ledger.fakes import Fakes
from floorplan.ledger.inputs import resized
from floorplan.ledger.kernels import quiet_fakes
from floorplan.ledger.losses import Shared, faked, spelled, ungraded, weights_of
from floorplan.ledger.storage import StorageTracker
from floorplan.step.compile import Step
from floorplan.step.runner import Outputs, Runner
from floorplan.torch_doors import map_tensors, tensors_in, wants_values


class WholeLoss:
    """The loss of a whole batch of any size, and its gradients by what the model returns."""

    def __init__(self, step: Step, fakes: Fakes, given: Sequence[Any]) -> None:
        """given: example inputs, and a target."""
        self.loss, self.fakes, self.target = step.loss, fakes, given[-1]
        runner: Runner = step.bound(fakes.gm).__self__  # type: ignore[attr-defined]
        self.head, self.returned = runner.head, _returned(runner, fakes.on(given[:-1]))
        self.seeds: list[Any] = []
        self.at = lru_cache(None)(self._at)

    def _at(self, n: int) -> tuple[Whole, Worked]:
        """Bytes and work of the loss of n samples."""
        weights, returned = weights_of(self.loss), [resized(t, n) for t in tensors_in(self.returned)]
        fakes = self.fakes.on([*weights, resized(self.target, n), *returned])
        work, found, many = Work(), [0, 0], len(weights)

        def drive(model: nn.Module, given: tuple[Any, ...], tracker: StorageTracker) -> None:
            outs, whole, lives = iter(given[many + 1 :]), Outputs(n), tracker.timeline.lives
            with torch.no_grad():
                whole.put(map_tensors(lambda _: next(outs), self.returned))
                found[0] = sum(lives[i].nbytes for i in tracker.alive.values())
                run = Shared(faked(self.loss, given[:many]), None, n).whole
                value, self.seeds = whole.loss(run, given[many], self.head)
            found[1] = sum(lives[i].nbytes for i in tracker.alive.values())
            del value

        try:
            step = ledger.Step(fakes.gm, fakes.inputs, drive=drive)
            with ungraded(self.loss):
                seen = ledger.run(step, ledger.Watch(within=lambda _: work), fakes)
        except FloorplanError:
            raise
        except Exception as e:
            why = "reads values, which a plan does not have" if wants_values(e) else first_line(e)
            raise FloorplanError(f"loss {spelled(self.loss)}: fails on outputs of {n} samples: {why}") from e
        return Whole(found[0], int(seen.timeline.peak()), found[1]), work.take()


def _returned(runner: Runner, fakes: Fakes) -> Any:
    """What the model returns for few samples, as the step lays it."""
    with quiet_fakes(), fakes.mode, torch.no_grad():
        box = list(fakes.inputs)
        for s in runner.stages:
            box = list(s.forward(box)[: s.results])
        return runner.head.outputs(box)
