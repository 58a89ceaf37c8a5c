"""The command `floorplan remat`."""

import json
from typing import Annotated

import typer

from floorplan import api
from floorplan.budget.amount import bytes_of
from floorplan.budget.remat.report import remat as recompute
from floorplan.cli.options import (
    Allow,
    Head,
    Input,
    Json,
    Measure,
    Method,
    Model,
    Out,
    RankSet,
    Seed,
    Sites,
    Trust,
    Weights,
    busy,
    put,
    shapes_of,
)
from floorplan.files import ensure_writable

Budget = Annotated[str | None, typer.Option(help="Memory for all of the training: 32MB (1e6), 32MiB, or bytes.")]
Bits = Annotated[
    int | None,
    typer.Option("--lossy-bits", min=1, max=8, help="LOSSY: keep so many bits of a smooth activation's derivative."),
]


def remat(
    model: Model,
    output: Out,
    budget: Budget = None,
    rank: RankSet = 2,
    method: Method = "memflora",
    sites: Sites = "auto",
    seed: Seed = 0,
    train_head: Head = False,
    input: Input = None,
    batch: Annotated[int, typer.Option(help="Batch size of the step.", min=1)] = 8,
    loss: Annotated[str, typer.Option(help="cross_entropy, mse or sum.")] = "cross_entropy",
    lossy_bits: Bits = None,
    measure: Measure = False,
    json_file: Json = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing outputs.")] = False,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """Compute again in the backward what cannot reach the floor (SiLU, squeeze-excite, LayerNorm, …), exactly.

    Exit code 0: written. 1: the budget is not met, nothing is written. 2: the input cannot be used.
    """
    target = ensure_writable(output, force)
    if json_file and json_file != "-":
        ensure_writable(json_file, force=True)
    with busy(f"searching what {model} can compute again"):
        found = recompute(
            model,
            None if budget is None else bytes_of(budget),
            batch=batch,
            rank=rank,
            method=method,
            sites=sites,
            seed=seed,
            train_head=train_head,
            loss=loss,
            lossy_bits=lossy_bits,
            measured=measure,
            shapes=shapes_of(input),
            weights=weights,
            allow=allow or (),
            trust=trust,
        )
        if found.fits:
            api.save(found.module, target, force=force)
    if json_file:
        put(json_file, json.dumps(found.as_json(), indent=1))
    if json_file != "-":
        print(found)
    raise typer.Exit(0 if found.fits else 1)
