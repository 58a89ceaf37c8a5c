"""The zoo: for every model, is what was predicted what is measured, before and after the rewrite?

    python benchmarks/zoo.py [--family torchvision|timm|examples|all] [--only NAME] [--jobs 2]

Each model runs in a process of its own, in train and in eval mode, at batch 2 and 3, as it stands
and adapted at rank 2. Results go to benchmarks/results/zoo.json (models that were not run keep
their rows) and, as tables, to docs/zoo.md.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
import zoo_models
import zoo_table
from torch import Tensor, fx, nn

RESULTS, TABLES = ROOT / "benchmarks" / "results" / "zoo.json", ROOT / "docs" / "zoo.md"
Shape = Sequence[int]
RANK, FULL_BATCH = 2, 8
PRELOAD = ("torch", "torchvision", "timm", "sympy", "torch._dynamo")


@dataclass(frozen=True)
class Row:
    """What was found for one model; bytes at batch 8 and the model's usual image size."""

    family: str
    name: str
    shape: tuple[int, ...] = ()  # of the images that were run for real, without batch
    error: str = ""  # one line: where it stopped and why
    checks: int = 0  # pairs of predicted and measured figures that were compared
    unequal: tuple[str, ...] = ()  # those that differ
    saved_before: int | None = None
    saved_after: int | None = None
    verdict_before: str = ""
    verdict_after: str = ""
    notes_before: Sequence[str] = ()  # why a verdict is UNPROVEN
    notes_after: Sequence[str] = ()
    guilty: dict[str, int] = field(default_factory=dict)  # op -> saved tensors above the floor
    opaque: dict[str, str] = field(default_factory=dict)
    init_difference: float | None = None
    seconds: float = 0.0


def study(family: str, name: str, proofs: bool, keep: Any) -> None:
    """Fill the row of one model, handing over what is known at every step."""
    row, start, step = Row(family, name), time.monotonic(), "build"

    def put(**known: Any) -> None:
        nonlocal row
        row = replace(row, **known, seconds=round(time.monotonic() - start, 1))
        keep(row)

    try:
        sample = zoo_models.build(family, name)
        put(shape=sample.shape)
        model, full = sample.model, batch_of(FULL_BATCH, sample.full)
        for side in ("before", "after"):
            graph = None
            if side == "after":
                step = "rewrite"
                graph, opaque = rewritten(model, sample.shape)
                start_difference = difference(graph, model, batch_of(2, sample.shape))
                put(opaque=opaque, init_difference=start_difference)
            step = f"{side} the rewrite"
            for unequal in compared(side, model, graph, sample.shape, proofs):
                put(checks=row.checks + 1, unequal=row.unequal + unequal)
            if proofs:
                put(**proved(side, graph or model, full))
    except Exception as e:  # a model that fails is a row, not the end of the run
        put(error=f"{step}: {type(e).__name__}: {' '.join(str(e).split())[:400]}")


def batch_of(n: int, shape: Shape) -> Tensor:
    """Seeded random images."""
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))


def rewritten(model: nn.Module, shape: Shape) -> tuple[fx.GraphModule, dict[str, str]]:
    """The adapted graph, and the modules that could not be traced."""
    from floorplan import passes
    from floorplan.graph import driver
    from floorplan.graph.trace import trace
    from floorplan.passes.insert_memflora import memflora

    traced = trace(model, (batch_of(2, shape),), both_modes=True)
    line = passes.pipeline(memflora(RANK, "auto", 0, False))
    gm, _ = driver.rewrite(traced.gm, line, lambda p, before, after: None)
    return gm, traced.opaque


def difference(adapted: nn.Module, source: nn.Module, x: Tensor) -> float:
    """Largest difference of the outputs in eval mode, over the largest output."""
    from floorplan.ledger.differ import relative_error
    from floorplan.torch_doors import tensors_in

    with torch.no_grad():
        got, want = (list(tensors_in(m.eval()(x))) for m in (adapted, source))
    if len(got) != len(want):
        return float("inf")
    return max(relative_error(a, b) for a, b in zip(got, want, strict=True))


def compared(
    side: str, model: nn.Module, adapted: fx.GraphModule | None, shape: Shape, everything: bool
) -> Iterator[tuple[str, ...]]:
    """A line on the figures that differ, if any do, for every mode and batch."""
    from floorplan.errors import FloorplanError
    from floorplan.graph.trace import trace
    from floorplan.ledger.figures import measure

    cases = list(itertools.product(("train", "eval"), (2, 3)))
    for mode, batch in cases if everything else cases[:1]:
        real, x = adapted or model, batch_of(batch, shape)
        real.train(mode == "train")
        gm, where = adapted or trace(model, (x,)).gm, f"{side}, {mode}, batch {batch}"
        try:
            yield differing(where, predict(gm, x), measure(real, (x,)))
        except FloorplanError as e:
            yield (f"{where}: {e}",)


def predict(gm: fx.GraphModule, x: Tensor) -> Any:
    """The exact figures, as `check` finds them, without the symbolic proof."""
    from floorplan.ledger.fakes import concrete_fakes
    from floorplan.ledger.figures import figures
    from floorplan.ledger.run import Step, Watch, run

    fakes = concrete_fakes(gm, (x,))
    hooked = run(Step(fakes.gm, fakes.inputs).forward, Watch(hooks=True), fakes)
    plain = run(Step(fakes.gm, fakes.inputs), Watch(), fakes)
    return figures(fakes.gm, hooked, plain, [x])


def differing(where: str, predicted: Any, measured: Any) -> tuple[str, ...]:
    """One line on the figures that differ, none if they agree."""
    p, m = predicted.as_dict(), measured.as_dict()
    p["saved = census"], m["saved = census"] = m["saved"], m["saved_census"]
    lines = [f"{k} {p[k]:,} for {m[k]:,}" for k in p if p[k] != m[k]]
    return (f"{where}: {'; '.join(lines)}",) if lines else ()


def proved(side: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Verdict and saved bytes in train mode at the full size; values of x are not read."""
    from floorplan.graph.trace import trace
    from floorplan.ledger.analyze import analyze

    traced = trace(model.train(), (x,))
    found = analyze(traced.gm, (x,), opaque=traced.opaque)
    known: dict[str, Any] = {
        f"saved_{side}": found.figures.saved,
        f"verdict_{side}": found.proof.verdict,
        f"notes_{side}": [n for n in found.notes if "not proved" in n],
    }
    if side == "after":
        known["guilty"] = dict(Counter(e.op for e in found.proof.guilty).most_common())
    return known


def _child(family: str, name: str, proofs: bool, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    study(family, name, proofs, lambda row: pipe.send(asdict(row)))


def in_process(family: str, name: str, proofs: bool, limit: float) -> Row:
    """Study one model in its own process; what it had found when it died or timed out is kept."""
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(family, name, proofs, send))
    start, row = time.monotonic(), Row(family, name)
    child.start()
    send.close()
    error = f"stopped after {limit:.0f} s"
    while (left := start + limit - time.monotonic()) > 0 and receive.poll(left):
        try:
            row = Row(**receive.recv())
        except EOFError:
            child.join(10)
            error = "" if child.exitcode == 0 else f"the process ended with {child.exitcode}"
            break
    if child.is_alive():
        child.kill()
    child.join()
    return replace(row, error=row.error or error)


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of an earlier run."""
    if not path.exists():
        return {}
    rows = cast(list[dict[str, Any]], json.loads(path.read_text())["rows"])
    return {(r["family"], r["name"]): r for r in rows}


def write(results: Path, tables: Path, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """The JSON cache and the page made from it."""
    order = {f: i for i, f in enumerate(zoo_models.FAMILIES)}
    done = sorted(rows.values(), key=lambda r: (order[r["family"]], r["name"]))
    document = {"schema": "floorplan.zoo/1", "versions": versions(), "rank": RANK, "rows": done}
    results.parent.mkdir(exist_ok=True)
    texts = {results: json.dumps(document, indent=1), tables: zoo_table.page(document)}
    for path, text in texts.items():
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(text + "\n")
        os.replace(draft, path)


def versions() -> dict[str, str]:
    """What the figures were made with."""
    from importlib.metadata import version

    return {n: version(n) for n in ("torch", "torchvision", "timm")}


def main() -> int:
    """Exit code 1 if a model failed or a figure differs."""
    p = argparse.ArgumentParser(description="Predicted against measured, over many models.")
    p.add_argument("--family", choices=[*zoo_models.FAMILIES, "all"], default="all")
    p.add_argument("--only", action="append", metavar="NAME", help="this model (may be repeated)")
    p.add_argument("--jobs", type=int, default=2, help="models at a time")
    p.add_argument("--timeout", type=float, default=300, help="seconds a model")
    p.add_argument("--missing", action="store_true", help="skip models whose rows are good")
    p.add_argument("--quick", action="store_true", help="batch 2 in train mode alone, not written")
    args = p.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    families = zoo_models.FAMILIES if args.family == "all" else (args.family,)
    rows = read_rows(RESULTS)
    good = {k for k, r in rows.items() if args.missing and not r["error"] and not r["unequal"]}
    todo = [(f, n) for f in families for n in zoo_models.names(f) if (f, n) not in good]
    if args.only:  # in the order given
        todo = [t for name in args.only for t in todo if t[1] == name]
    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        run = [pool.submit(in_process, *t, not args.quick, args.timeout) for t in todo]
        for i, done in enumerate(as_completed(run), 1):
            row = done.result()
            failed += bool(row.error or row.unequal)
            print(f"[{i}/{len(todo)}] {zoo_table.line(asdict(row))}", file=sys.stderr, flush=True)
            if not args.quick:
                rows[row.family, row.name] = asdict(row)
                write(RESULTS, TABLES, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
