"""The command line: floorplan check, rewrite, plan, remat, compare, merge, why, gate."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from floorplan import api
from floorplan.cli import gate
from floorplan.cli.options import (
    Allow,
    Batch,
    Config,
    FromPlan,
    Head,
    Input,
    Json,
    Measure,
    Method,
    Model,
    Node,
    Out,
    Rank,
    RankSet,
    Sarif,
    Seed,
    Sites,
    Trust,
    Weights,
    busy,
    dtype_of,
    names,
    numbers,
    put,
    shapes_of,
)
from floorplan.cli.plan import plan
from floorplan.cli.remat import remat
from floorplan.errors import FloorplanError
from floorplan.files import ensure_drawable, ensure_writable, write_text
from floorplan.ledger import sarif
from floorplan.ledger import why as explain
from floorplan.methods import pictures
from floorplan.methods.catalogue import METHODS
from floorplan.methods.compare import compare as compare_methods
from floorplan.methods.merge_file import merge_file
from floorplan.methods.subject import Source

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What will autograd keep, is it the activation-memory floor, and the rewrite that gets there.",
)


@app.command()
def check(
    model: Model,
    rank: Rank = None,
    method: Method = "memflora",
    sites: Sites = "auto",
    seed: Seed = 0,
    train_head: Head = False,
    batch: Batch = None,
    input: Input = None,
    measure: Measure = False,
    autocast: Annotated[str | None, typer.Option(help="Under autocast: bf16 or fp16.")] = None,
    mode: Annotated[str, typer.Option(help="Check the model in this mode: as saved, train or eval.")] = "saved",
    json_file: Json = None,
    sarif_file: Sarif = None,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """List what autograd will keep and prove whether it is the activation-memory floor.

    Exit code 0: AT_FLOOR. 1: ABOVE_FLOOR or UNPROVEN. 2: the input cannot be used.
    """
    for path in (json_file, sarif_file):
        if path and path != "-":
            ensure_writable(path, force=True)
    with busy(f"checking {model}"):
        report = api.check(
            model,
            rank=rank,
            method=method,
            sites=sites,
            seed=seed,
            train_head=train_head,
            batch=batch,
            shapes=shapes_of(input),
            measured=measure,
            autocast=dtype_of(autocast),
            mode=mode,
            weights=weights,
            allow=allow or (),
            trust=trust,
        )
    if sarif_file:
        put(sarif_file, json.dumps(sarif.document(report), indent=1))
    if json_file:
        put(json_file, json.dumps(report.as_json(), indent=1))
    if "-" not in (json_file, sarif_file):
        print(report)
    raise typer.Exit(report.exit_code)


@app.command()
def rewrite(
    model: Model,
    output: Out,
    rank: RankSet = 2,
    method: Method = "memflora",
    sites: Sites = "auto",
    seed: Seed = 0,
    train_head: Head = False,
    batch: Batch = None,
    input: Input = None,
    plan: FromPlan = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing outputs.")] = False,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """Adapt a model with MemFLoRA, verify every pass, and write it with its report beside it."""
    target = ensure_writable(output, force)
    reports = [target.with_name(target.stem + ".report" + end) for end in (".json", ".md")]
    for path in reports:
        ensure_writable(path, force)
    with busy(f"rewriting {model}"):
        result = api.rewrite(
            model,
            rank=rank,
            method=method,
            sites=sites,
            seed=seed,
            train_head=train_head,
            batch=batch,
            shapes=shapes_of(input),
            weights=weights,
            allow=allow or (),
            trust=trust,
            plan=plan,
        )
        api.save_verified(result, target, force=force)
    write_text(reports[0], json.dumps(result.report.as_json(), indent=1))
    write_text(reports[1], result.report.markdown())
    print(result.report)
    print(f"wrote {target}, {reports[0].name}, {reports[1].name}")


@app.command()
def merge(
    adapted: Annotated[str, typer.Argument(help="An adapted.pt.")],
    output: Annotated[str, typer.Option("-o", "--output", help="The plain model, or the state_dict.")],
    into: Annotated[str | None, typer.Option(help="Write a state_dict of this source model instead.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")] = False,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """Merge the adapters of an adapted.pt into plain torch layers, verified before it is written."""
    if into is None and (weights is not None or allow or trust):
        raise FloorplanError("merge: --weights, --allow and --trust belong to --into MODEL; name it")
    source = None if into is None else Source(into, weights=weights, allow=allow or (), trust=trust)
    with busy(f"merging {adapted}"):
        line = merge_file(adapted, output, source, force)
    print(line)


@app.command()
def compare(
    model: Model,
    methods: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(METHODS) + ".")] = "full,lora-c,memflora",
    rank: Annotated[str, typer.Option(help="Ranks, comma-separated.")] = "2",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "8",
    loss: Annotated[str, typer.Option(help="cross_entropy, mse or sum.")] = "cross_entropy",
    sites: Sites = "auto",
    seed: Seed = 0,
    train_head: Head = False,
    input: Input = None,
    measure: Measure = False,
    json_file: Json = None,
    csv_file: Annotated[str | None, typer.Option("--csv", help="Write the table as CSV.")] = None,
    markdown: Annotated[str | None, typer.Option("--markdown", help="Write the table as Markdown.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", help="Draw it: a .png, .svg or .pdf file.")] = None,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """What each method keeps, holds and multiplies in one training step, side by side."""
    for path in (json_file, csv_file, markdown):
        if path and path != "-":
            ensure_writable(path, force=True)
    if plot:
        ensure_drawable(plot)
    with busy(f"comparing methods on {model}"):
        found = compare_methods(
            model,
            methods=names(methods),
            ranks=numbers("--rank", rank),
            batches=numbers("--batch", batch),
            loss=loss,
            sites=sites,
            seed=seed,
            train_head=train_head,
            measured=measure,
            shapes=shapes_of(input),
            weights=weights,
            allow=allow or (),
            trust=trust,
        )
        if plot:
            pictures.draw(found, plot)
    if json_file:
        put(json_file, json.dumps(found.as_json(), indent=1))
    if csv_file:
        put(csv_file, found.csv())
    if markdown:
        put(markdown, found.markdown())
    if "-" not in (json_file, csv_file, markdown):
        print(found)


@app.command()
def why(
    model: Model,
    node: Node,
    rank: Rank = None,
    sites: Sites = "auto",
    batch: Batch = None,
    input: Input = None,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """Explain one node: what it keeps, the formula, why autograd keeps it, what would remove it."""
    with busy(f"checking {model}"):
        report = api.check(
            model,
            rank=rank,
            sites=sites,
            batch=batch,
            shapes=shapes_of(input),
            weights=weights,
            allow=allow or (),
            trust=trust,
        )
    print(explain.why(report, node))


app.command()(plan)
app.command()(remat)


@app.command("gate")
def gate_command(config: Config = Path("pyproject.toml")) -> None:
    """Check every model that a pyproject.toml lists; exit 1 if one is not at the floor."""
    failed = gate.run(config, print)
    raise typer.Exit(1 if failed else 0)


def main() -> None:
    """Run the command line; one line on stderr and exit code 2 for what cannot be used."""
    try:
        raise SystemExit(app(standalone_mode=False) or 0)
    except FloorplanError as e:
        _refuse(str(e))
    except BrokenPipeError:
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        _refuse("interrupted; nothing was written")
    except Exception as e:
        # Typer's own exceptions (a missing argument, an unknown option) are click's, vendored or not.
        if hasattr(e, "format_message"):
            _refuse(f"{e.format_message()}; `floorplan --help` lists what there is")
        if os.environ.get("FLOORPLAN_TRACEBACK"):
            raise
        what = " ".join(str(e).split())[:200]
        _refuse(f"{type(e).__name__}: {what}; FLOORPLAN_TRACEBACK=1 shows where, please report it")


def _refuse(text: str) -> NoReturn:
    print(f"floorplan: {' '.join(text.split())}", file=sys.stderr)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()
