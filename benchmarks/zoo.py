"""The zoo: for every model, is what was predicted what is measured, before and after the rewrite?

    python benchmarks/zoo.py [--family torchvision|timm|examples|all|timm-more] [--missing] [--only NAME] [--jobs 2]

Each model runs in a process of its own through `floorplan.rewrite` and `floorplan.check`, as it is created (in train
mode) and in eval mode, at batch 2 and 3. Results go to benchmarks/results/zoo.json (models that were not run keep their
rows) and, as tables, to docs/zoo.md; those of timm-more to zoo_timm.json and zoo_timm.md.
"""

import argparse
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
from torch import Tensor, nn

import floorplan
from floorplan.ledger.report import CheckReport

PAGES = {"zoo": zoo_models.FAMILIES, "zoo_timm": (zoo_models.MORE,)}  # benchmarks/results/NAME.json, docs/NAME.md
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
    own_difference: float | None = None  # of the source, its inputs and weights moved by one unit in the last place
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
        for mode in ("train", "eval") if proofs else ("train",):
            step = f"rewrite in {mode} mode"
            found = floorplan.rewrite(model.train(mode == "train"), batch_of(2, sample.shape), RANK)
            module, after = found.module, found.report.after
            put(opaque=after.opaque)
            if mode == "train":
                put(**started(module, model, batch_of(2, sample.shape)))
                put(**seen("before", found.report.before), **seen("after", after))
            model.train(mode == "train")
            module.train(mode == "train")
            step = f"check in {mode} mode"
            for where, report in reports(model, module, found.report, mode, sample.shape, proofs):
                put(checks=row.checks + 1, unequal=row.unequal + differing(where, report.predicted, report.measured))
            if proofs and mode == "train" and family != zoo_models.MORE:
                for side, m in (("before", model), ("after", module)):
                    put(**seen(side, floorplan.check(m, full)))
    except Exception as e:  # a model that fails is a row, not the end of the run
        put(error=f"{step}: {type(e).__name__}: {' '.join(str(e).split())[:400]}")


def batch_of(n: int, shape: Shape) -> Tensor:
    """Seeded random images."""
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))


def started(adapted: nn.Module, source: nn.Module, x: Tensor) -> dict[str, float]:
    """Largest difference of the outputs in eval mode over the largest output, and what rounding of the source's own
    inputs and weights makes of them.
    """
    from floorplan.ledger.differ import relative_error
    from floorplan.methods.verify import eval_outputs, moved

    want = eval_outputs(source, (x,))

    def far(m: nn.Module, inputs: tuple[Any, ...]) -> float:
        got = eval_outputs(m, inputs)
        return max(map(relative_error, got, want)) if len(got) == len(want) else float("inf")

    return {
        "init_difference": far(adapted, (x,)),
        "own_difference": max(far(*moved(source, (x,), seed)) for seed in range(3)),
    }


def reports(
    model: nn.Module, module: nn.Module, first: Any, mode: str, shape: Shape, proofs: bool
) -> Iterator[tuple[str, CheckReport]]:
    """Every comparison of predicted and measured figures in one mode: before and after, at batch 2 and 3."""
    yield f"before, {mode}, batch 2", first.before
    after = first.after if mode == "train" else floorplan.check(module, batch_of(2, shape), measured=True)
    yield f"after, {mode}, batch 2", after
    for side, m in (("before", model), ("after", module)) if proofs else ():
        yield f"{side}, {mode}, batch 3", floorplan.check(m, batch_of(3, shape), measured=True)


def differing(where: str, predicted: Any, measured: Any) -> tuple[str, ...]:
    """One line on the figures that differ, none if they agree."""
    p, m = predicted.as_dict(), measured.as_dict()
    p["saved = census"], m["saved = census"] = m["saved"], m["saved_census"]
    lines = [f"{k} {p[k]:,} for {m[k]:,}" for k in p if p[k] != m[k]]
    return (f"{where}: {'; '.join(lines)}",) if lines else ()


def seen(side: str, report: CheckReport) -> dict[str, Any]:
    """Verdict and saved bytes of a report."""
    known: dict[str, Any] = {
        f"saved_{side}": report.predicted.saved,
        f"verdict_{side}": report.verdict,
        f"notes_{side}": [n for n in report.notes if "not proved" in n],
    }
    if side == "after":
        known["guilty"] = dict(Counter(e.op for e in report.proof.guilty).most_common())
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
    order = {f: i for i, f in enumerate((*zoo_models.FAMILIES, zoo_models.MORE))}
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
    p.add_argument("--family", choices=[*zoo_models.FAMILIES, "all", zoo_models.MORE], default="all")
    p.add_argument("--only", action="append", metavar="NAME", help="this model (may be repeated)")
    p.add_argument("--jobs", type=int, default=2, help="models at a time")
    p.add_argument("--timeout", type=float, default=300, help="seconds a model")
    p.add_argument("--missing", action="store_true", help="skip models whose rows are good")
    p.add_argument("--quick", action="store_true", help="batch 2 in train mode alone, not written")
    args = p.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    families = zoo_models.FAMILIES if args.family == "all" else (args.family,)
    page = next(name for name, of in PAGES.items() if families[0] in of)
    results, tables = ROOT / "benchmarks" / "results" / f"{page}.json", ROOT / "docs" / f"{page}.md"
    rows = read_rows(results)
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
                write(results, tables, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
