"""For a user's own pytest: fail when a model keeps more than the floor."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from floorplan import api
from floorplan.ledger.criterion import AT_FLOOR
from floorplan.ledger.report import shape_text
from floorplan.render import Table, draw


def assert_memory_floor(
    model: nn.Module | str,
    inputs: Any = None,
    rank: int | None = None,
    *,
    sites: str = "auto",
    shapes: Sequence[Sequence[int]] | None = None,
    batch: int | None = None,
    run: bool = True,
) -> None:
    """AssertionError with the table of guilty tensors unless the model is proved to be at the floor.

    rank: judge the model as `rewrite` would adapt it; None: as it stands, by its own flags and mode.
    run: as in `check`.
    """
    report = api.check(model, inputs, rank, sites=sites, shapes=shapes, batch=batch, run=run)
    said, rests = f"{report.name} is {report.verdict} in {report.mode} mode", "\n".join(report.rests_on())
    if report.verdict == AT_FLOOR:
        print(f"{said}\n{rests}")  # `pytest -rP` shows it
        return
    rows = [[e.node, e.op, e.pillar, shape_text(e), e.nbytes, e.reason, e.fix] for e in report.proof.guilty]
    header = ["node", "op", "pillar", "shape", "bytes", "why", "what would remove it"]
    table = draw(Table("tensors", header, rows, right=(4,)))
    raise AssertionError(f"{said}, not AT_FLOOR\n{table}\n{rests}")
