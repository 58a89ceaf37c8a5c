"""The command `floorplan remat`."""

from typing import Annotated

import typer

from floorplan import api
from floorplan.budget.amount import bytes_of
from floorplan.budget.remat.report import recomputed
from floorplan.cli.options import Force, Loss, Measure, MethodOptions, ModelOptions, Out, Outputs, RankSet, busy
from floorplan.files import ensure_writable

Budget = Annotated[str | None, typer.Option(help="Memory for all of the training: 32MB (1e6), 32MiB, or bytes.")]
Bits = Annotated[
    int | None,
    typer.Option("--lossy-bits", min=1, max=8, help="LOSSY: keep so many bits of a smooth activation's derivative."),
]


def remat(
    given: ModelOptions,
    how: MethodOptions,
    to: Outputs,
    output: Out,
    budget: Budget = None,
    rank: RankSet = 2,
    batch: Annotated[int, typer.Option(help="Batch size of the step.", min=1)] = 8,
    loss: Loss = "cross_entropy",
    lossy_bits: Bits = None,
    measure: Measure = False,
    force: Force = False,
) -> None:
    """Compute again in the backward what cannot reach the floor (SiLU, squeeze-excite, LayerNorm, …), exactly.

    Exit code 0: written. 1: the budget is not met, nothing is written. 2: the input cannot be used.
    """
    target = ensure_writable(output, force)
    to.ready(given.model, given.weights, output)
    with busy(f"searching what {given.model} can compute again"):
        room = None if budget is None else bytes_of(budget)
        found = recomputed(given.source(batch), how.plan(rank), room, loss, lossy_bits, measure)
        if found.fits:
            api.save(found.module, target, force=force, allow=given.allow or ())
    to.write(found)
    raise typer.Exit(0 if found.fits else 1)
