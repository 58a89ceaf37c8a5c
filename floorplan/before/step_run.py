"""`floorplan.step_run` of a step.py written by 0.1: see floorplan.step.runner."""

from dataclasses import dataclass

from floorplan.step import runner
from floorplan.step.runner import Stage


@dataclass(frozen=True)
class Runner(runner.Runner):
    """Whose mean=True was a default, which said nothing of the loss."""

    def __post_init__(self) -> None:
        """Such a loss sees the whole batch."""
        super().__post_init__()
        object.__setattr__(self, "mean", None if self.mean else self.mean)


__all__ = ["Runner", "Stage"]
