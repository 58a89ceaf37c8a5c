"""Options that several commands share, and how they are read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from floorplan.errors import FloorplanError
from floorplan.files import write_text
from floorplan.methods.catalogue import METHODS

Model = Annotated[
    str, typer.Argument(help="A .pt file of torch.save(model), pkg.mod:factory, file.py:factory, or an adapted.pt.")
]
Method = Annotated[str, typer.Option(help="How to adapt: " + ", ".join(METHODS) + ".", show_default=True)]
Rank = Annotated[int | None, typer.Option(help="Judge the model as `rewrite` would adapt it at this rank.", min=1)]
RankSet = Annotated[int, typer.Option(help="Rank of the adapters.", min=1)]
Sites = Annotated[str, typer.Option(help="auto, all, pointwise, or globs over conv names (comma-separated).")]
Seed = Annotated[int, typer.Option(help="Seed of the frozen projections.")]
Head = Annotated[bool, typer.Option("--train-head", help="Keep the last Linear layer trainable.")]
Batch = Annotated[int | None, typer.Option(help="Batch size of the byte figures.", min=1)]
Input = Annotated[list[str] | None, typer.Option("--input", help="Shape of one sample, C,H,W; once for each input.")]
Weights = Annotated[str | None, typer.Option(help="A state_dict to load into the factory's model.")]
Allow = Annotated[list[str] | None, typer.Option(help="Admit nn.Module classes of this installed package from a file.")]
Trust = Annotated[bool, typer.Option("--trust", help="Unpickle the file as it is: THIS RUNS ANY CODE IN IT.")]
Measure = Annotated[bool, typer.Option("--measure", help="Run the model too: predicted, measured, difference.")]
Out = Annotated[str, typer.Option("-o", "--output", help="The adapted model (data, not code).")]
FromPlan = Annotated[
    str | None, typer.Option("--plan", help="A plan.json: its rank, sites, method and seed, and its schedule.")
]
Node = Annotated[str, typer.Argument(help="A node or module name, such as layer3.2.conv2.")]
Config = Annotated[Path, typer.Argument(help="A pyproject.toml with [[tool.floorplan.gate]] entries.")]
Sarif = Annotated[str | None, typer.Option("--sarif", help="Write the guilty tensors as SARIF 2.1.0 ('-': to stdout).")]
Json = Annotated[
    str | None, typer.Option("--json", help="Write the whole report as JSON ('-': to stdout, instead of the table).")
]


def shapes_of(inputs: list[str] | None) -> list[tuple[int, ...]] | None:
    """--input options as shapes without batch."""
    if not inputs:
        return None
    try:
        shapes = [tuple(int(n) for n in text.replace("x", ",").split(",")) for text in inputs]
    except ValueError as e:
        raise FloorplanError(f"--input {inputs[0]}: not a shape; write it as 3,224,224") from e
    if any(n < 1 for s in shapes for n in s):
        raise FloorplanError(f"--input {inputs[0]}: sizes must be positive")
    return shapes


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner on stderr while something runs; silent when stderr is not a terminal.

    What the model's own forward prints goes to stderr: stdout is the report's.
    """
    console = Console(stderr=True)
    with redirect_stdout(sys.stderr):
        if not console.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what)
            yield


def dtype_of(name: str | None) -> torch.dtype | None:
    """--autocast bf16 or fp16."""
    known = {
        None: None,
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp16": torch.float16,
        "float16": torch.float16,
    }
    if name not in known:
        raise FloorplanError(f"--autocast {name}: not known; use bf16 or fp16")
    return known[name]


def put(path: str, document: str) -> None:
    """A document to a file, or to stdout in place of the table if the path is '-'."""
    if path == "-":
        print(document)
    else:
        write_text(path, document)


def names(text: str) -> list[str]:
    """Comma-separated words."""
    return [n.strip() for n in text.split(",") if n.strip()]


def numbers(option: str, text: str) -> list[int]:
    """Comma-separated whole numbers; FloorplanError names the option."""
    try:
        return [int(n) for n in names(text)]
    except ValueError as e:
        raise FloorplanError(f"{option} {text}: write whole numbers, comma-separated") from e
