"""Options that several commands share, and how they are read."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from floorplan.errors import FloorplanError
from floorplan.files import ensure_writable, split_factory, write_text
from floorplan.methods.catalogue import Options, Plan, method_names
from floorplan.methods.subject import Source
from floorplan.render import FORMS, Report

Model = Annotated[
    str, typer.Argument(help="A .pt file of torch.save(model), pkg.mod:factory, file.py:factory, or an adapted.pt.")
]
Input = Annotated[
    list[str] | None, typer.Option("--input", help="Shape of one sample, C,H,W; one an input; NAME=C,H,W: in a dict.")
]
Methods = Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(method_names()) + ".")]
Sites = Annotated[str, typer.Option(help="auto, all, pointwise, or globs over conv names (comma-separated).")]
Rank = Annotated[int | None, typer.Option(help="Judge the model as `rewrite` would adapt it at this rank.", min=1)]
RankSet = Annotated[int, typer.Option(help="Rank of the adapters.", min=1)]
Batch = Annotated[int | None, typer.Option(help="Batch size of the byte figures.", min=1)]
Loss = Annotated[str, typer.Option(help="cross_entropy, mse or sum.")]
Measure = Annotated[bool, typer.Option("--measure", help="Run the model too: predicted, measured, difference.")]
NoRun = Annotated[bool, typer.Option("--no-run", help="Leave out the small real forward that is held against fakes.")]
Out = Annotated[str, typer.Option("-o", "--output", help="The adapted model (data, not code).")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing outputs.")]
Weights = Annotated[str | None, typer.Option(help="A state_dict to load into the factory's model.")]
KeepHead = Annotated[
    bool, typer.Option("--keep-head", help="Layers with another number of outputs in --weights keep the model's own.")
]
Allow = Annotated[list[str] | None, typer.Option(help="Admit nn.Module classes of this installed package from a file.")]
Trust = Annotated[bool, typer.Option("--trust", help="Unpickle the file as it is: THIS RUNS ANY CODE IN IT.")]


@dataclass(frozen=True)
class ModelOptions:
    """The model, the shape of its input, and how a file of it is loaded."""

    model: Model
    input: Input = None
    weights: Weights = None
    allow: Allow = None
    trust: Trust = False
    keep_head: KeepHead = False

    def source(self, batch: int | None = None) -> Source:
        """As a request."""
        how = self.weights, self.allow or (), self.trust, self.keep_head
        return Source(self.model, None, batch, shapes_of(self.input), *how)


@dataclass(frozen=True)
class SiteOptions:
    """What is adapted."""

    sites: Sites = "auto"
    seed: Annotated[int, typer.Option(help="Seed of the frozen projections.")] = 0
    train_head: Annotated[bool, typer.Option("--train-head", help="Keep the last Linear layer trainable.")] = False

    def options(self, rank: int = 2) -> Options:
        """At a rank."""
        return Options(rank, self.sites, self.seed, self.train_head)


@dataclass(frozen=True)
class MethodOptions(SiteOptions):
    """What is adapted, and by which method."""

    method: Annotated[str, typer.Option(help="How to adapt: " + ", ".join(method_names()) + ".")] = "memflora"

    def plan(self, rank: int) -> Plan:
        """At a rank."""
        return Plan(self.method, self.options(rank))


def _option(form: str) -> inspect.Parameter:
    option = typer.Option(f"--{form}", help=f"Write {FORMS[form].what} ('-': to stdout, instead of the table).")
    annotation = Annotated[str | None, option]
    return inspect.Parameter(form, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class Outputs:
    """Where a report goes, an option for each form of it; '-' is stdout, in place of the table."""

    __signature__ = inspect.Signature([_option(name) for name in FORMS if name != "text"])

    def __init__(self, **paths: str | None) -> None:
        self.documents: list[tuple[str, Callable[[Any], str]]] = []
        for name, path in paths.items():
            self.add(path, FORMS[name].of)

    def add(self, path: str | Path | None, form: Callable[[Any], str]) -> None:
        """One more document of the report."""
        if path:
            self.documents.append((str(path), form))

    def ready(self, *taken: str | None, files: Sequence[str | None] = (), force: bool = True) -> None:
        """FloorplanError before anything runs unless every file can be written, once, and not over what is taken."""
        seen = {path.resolve() for name in filter(None, taken) for path in _files_of(name)}
        paths = [path for path, _ in self.documents]
        if "-" in (*taken, *files):
            raise FloorplanError("-: only a report can go to stdout; name a file")
        if paths.count("-") > 1:
            raise FloorplanError("-: one document alone can go to stdout; name files for the others")
        for path in (*filter(None, files), *(path for path in paths if path != "-")):
            target = ensure_writable(path, force).resolve()
            if target in seen:
                raise FloorplanError(f"{path}: is the model or another output; name a file of its own")
            seen.add(target)

    def write(self, report: Report) -> bool:
        """Every document; the printed report too unless one went to stdout. Whether it was printed."""
        for path, form in self.documents:
            text = form(report)
            if path == "-":
                print(text, end="" if text.endswith("\n") else "\n")
            else:
                write_text(path, text)
        printed = all(path != "-" for path, _ in self.documents)
        if printed:
            print(report)
        return printed


def _files_of(name: str) -> Iterator[Path]:
    """The file that a user named, alone or with a factory, or the source of a module on the path."""
    place = split_factory(name)[0] or name
    yield Path(place)
    yield from (Path(folder or ".", *place.split(".")).with_suffix(".py") for folder in ("", *sys.path))


def spelled_out(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes groups of options, its signature the options one by one, as typer reads it."""
    own = inspect.signature(command).parameters
    groups = {name: p.annotation for name, p in own.items() if inspect.isclass(p.annotation)}
    options = {name: inspect.signature(group).parameters for name, group in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group(**{k: given.pop(k) for k in options[name]}) for name, group in groups.items()}
        command(**made, **given)

    flat = (q for name, p in own.items() for q in options.get(name, {name: p}).values())
    signature = inspect.Signature([q.replace(kind=inspect.Parameter.KEYWORD_ONLY) for q in flat])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def shapes_of(inputs: list[str] | None) -> list[Any] | None:
    """--input options as shapes without batch; those with names are one dict, where the first of them stands."""
    shapes, named = list[Any](), dict[str, tuple[int, ...]]()
    for text in inputs or ():
        name, _, sizes = text.rpartition("=")
        try:
            shape = tuple(int(n) for n in sizes.replace("x", ",").split(","))
        except ValueError as e:
            raise FloorplanError(f"--input {text}: not a shape; write it as 3,224,224") from e
        if min(shape) < 1:
            raise FloorplanError(f"--input {text}: sizes must be positive")
        if name:
            shapes += [] if named else [named]
            named[name] = shape
        else:
            shapes.append(shape)
    return shapes or None


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
    bf16, fp16 = torch.bfloat16, torch.float16
    known = {None: None, "bf16": bf16, "bfloat16": bf16, "fp16": fp16, "float16": fp16}
    if name not in known:
        raise FloorplanError(f"--autocast {name}: not known; use bf16 or fp16")
    return known[name]


def names(text: str) -> list[str]:
    """Comma-separated words."""
    return [n.strip() for n in text.split(",") if n.strip()]


def numbers(option: str, text: str) -> list[int]:
    """Comma-separated whole numbers; FloorplanError names the option."""
    try:
        return [int(n) for n in names(text)]
    except ValueError as e:
        raise FloorplanError(f"{option} {text}: write whole numbers, comma-separated") from e
