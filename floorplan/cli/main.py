"""The command line: floorplan check, rewrite, plan, remat, compare, merge, why, gate."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from floorplan import api
from floorplan.budget.plan import bytes_of
from floorplan.budget.remat.report import recomputed
from floorplan.cli import gate
from floorplan.cli import options as opt
from floorplan.cli.options import busy, spelled_out
from floorplan.cli.plan import BUDGET, plan
from floorplan.errors import FloorplanError
from floorplan.files import ensure_drawable, ensure_writable
from floorplan.ledger import sarif
from floorplan.ledger import why as explain
from floorplan.methods import pictures
from floorplan.methods.catalogue import plans_of
from floorplan.methods.compare import compared
from floorplan.methods.merge_file import merge_file
from floorplan.methods.subject import Source
from floorplan.render import FORMS

Bits = Annotated[
    int | None,
    typer.Option("--lossy-bits", min=1, max=8, help="LOSSY: keep so many bits of a smooth activation's derivative."),
]
Config = Annotated[Path, typer.Argument(help="A pyproject.toml with [\\[tool.floorplan.gate]] entries.")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What will autograd keep, is it the activation-memory floor, and the rewrite that gets there.",
)


@app.command()
@spelled_out
def check(
    given: opt.ModelOptions,
    how: opt.MethodOptions,
    to: opt.Outputs,
    rank: opt.Rank = None,
    batch: opt.Batch = None,
    measure: opt.Measure = False,
    autocast: Annotated[str | None, typer.Option(help="Under autocast: bf16 or fp16.")] = None,
    mode: Annotated[str, typer.Option(help="Check the model in this mode: as saved, train or eval.")] = "saved",
    no_run: opt.NoRun = False,
    sarif_file: Annotated[
        str | None, typer.Option("--sarif", help="Write the guilty tensors as SARIF 2.1.0 ('-': to stdout).")
    ] = None,
) -> None:
    """List what autograd will keep and prove whether it is the activation-memory floor.

    Exit code 0: AT_FLOOR. 1: ABOVE_FLOOR or UNPROVEN. 2: the input cannot be used.
    """
    to.add(sarif_file, lambda report: json.dumps(sarif.document(report), indent=1))
    to.ready(given.model, given.weights)
    with busy(f"checking {given.model}"):
        source, dtype = given.source(batch), opt.dtype_of(autocast)
        report = api.checked(source, rank, how.plan(rank or 1), api.Manner(measure, dtype, mode, not no_run))
    to.write(report)
    raise typer.Exit(report.exit_code)


@app.command()
@spelled_out
def rewrite(
    given: opt.ModelOptions,
    how: opt.MethodOptions,
    to: opt.Outputs,
    output: opt.Out,
    rank: opt.RankSet = 2,
    batch: opt.Batch = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="A plan.json: its rank, sites, method and seed, and its schedule.")
    ] = None,
    force: opt.Force = False,
) -> None:
    """Adapt a model with MemFLoRA, verify every pass, and write it with its report beside it."""
    target = ensure_writable(output, force)
    beside = [target.with_name(target.stem + ".report" + end) for end in (".json", ".md")]
    for path, form in zip(beside, ("json", "markdown"), strict=True):
        to.add(path, FORMS[form].of)
    to.ready(given.model, given.weights, plan, output, force=force)
    with busy(f"rewriting {given.model}"):
        result = api.rewritten(given.source(batch), how.plan(rank), plan)
        api.save_verified(result, target, force=force, allow=given.allow or ())
    if to.write(result.report):
        print(f"wrote {target}, {beside[0].name}, {beside[1].name}")


@app.command()
def merge(
    adapted: Annotated[str, typer.Argument(help="An adapted.pt.")],
    output: Annotated[str, typer.Option("-o", "--output", help="The plain model, or the state_dict.")],
    into: Annotated[str | None, typer.Option(help="Write a state_dict of this source model instead.")] = None,
    force: opt.Force = False,
    weights: opt.Weights = None,
    allow: opt.Allow = None,
    trust: opt.Trust = False,
    keep_head: opt.KeepHead = False,
) -> None:
    """Merge the adapters of an adapted.pt into plain torch layers, verified before it is written."""
    if into is None and (weights is not None or trust or keep_head):
        raise FloorplanError("merge: --weights, --keep-head and --trust belong to --into MODEL; name it")
    source = None if into is None else Source(into, None, None, None, weights, allow or (), trust, keep_head)
    with busy(f"merging {adapted}"):
        line = merge_file(adapted, output, source, force, allow or ())
    print(line)


@app.command()
@spelled_out
def compare(
    given: opt.ModelOptions,
    where: opt.SiteOptions,
    to: opt.Outputs,
    methods: opt.Methods = "full,lora-c,memflora",
    rank: Annotated[str, typer.Option(help="Ranks, comma-separated.")] = "2",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "8",
    loss: opt.Loss = "cross_entropy",
    measure: opt.Measure = False,
    plot: Annotated[str | None, typer.Option("--plot", help="Draw it: a .png, .svg or .pdf file.")] = None,
) -> None:
    """What each method keeps, holds and multiplies in one training step, side by side."""
    to.ready(given.model, given.weights, files=[plot])
    if plot:
        ensure_drawable(plot)
    plans = plans_of(opt.names(methods), opt.numbers("--rank", rank), where.options())
    with busy(f"comparing methods on {given.model}"):
        found = compared(given.source(), plans, opt.numbers("--batch", batch), loss, measure)
        if plot:
            pictures.draw(found, plot)
    to.write(found)


@app.command()
@spelled_out
def why(
    given: opt.ModelOptions,
    node: Annotated[str, typer.Argument(help="A node or module name, such as layer3.2.conv2.")],
    how: opt.MethodOptions,
    to: opt.Outputs,
    rank: opt.Rank = None,
    batch: opt.Batch = None,
) -> None:
    """Explain one node: what it keeps, the formula, why autograd keeps it, what would remove it."""
    to.ready(given.model, given.weights)
    with busy(f"checking {given.model}"):
        report = api.checked(given.source(batch), rank, how.plan(rank or 1))
    to.write(explain.why(report, node))


app.command()(spelled_out(plan))


@app.command()
@spelled_out
def remat(
    given: opt.ModelOptions,
    how: opt.MethodOptions,
    to: opt.Outputs,
    output: opt.Out,
    budget: Annotated[str | None, typer.Option(help=BUDGET)] = None,
    rank: opt.RankSet = 2,
    batch: Annotated[int, typer.Option(help="Batch size of the step.", min=1)] = 8,
    loss: opt.Loss = "cross_entropy",
    lossy_bits: Bits = None,
    measure: opt.Measure = False,
    force: opt.Force = False,
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


@app.command("gate")
def gate_command(config: Config = Path("pyproject.toml"), no_run: opt.NoRun = False) -> None:
    """Check every model that a pyproject.toml lists; exit 1 if one is not at the floor."""
    raise typer.Exit(1 if gate.run(config, print, not no_run) else 0)


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
            _refuse(f"{e.format_message().rstrip('.')}; `floorplan --help` lists what there is")
        if os.environ.get("FLOORPLAN_TRACEBACK"):
            raise
        what = " ".join(str(e).split())[:200]
        _refuse(f"{type(e).__name__}: {what}; FLOORPLAN_TRACEBACK=1 shows where, please report it")


def _refuse(text: str) -> NoReturn:
    print(f"floorplan: {' '.join(text.split())}", file=sys.stderr)
    raise SystemExit(2) from None
