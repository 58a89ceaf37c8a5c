"""The timeline of every model and method: is the predicted peak the measured one, and how close is the arena?

    python benchmarks/timeline_zoo.py [--family torchvision|timm|examples|all] [--methods a,b] [--only NAME]
                                      [--missing] [--minutes N]

One training step (cross entropy, rank 2, batch 2, small images, train mode) of each model by each method, on
fake tensors and for real, and, for MemFLoRA, the compiled step too. The arena places the storages of the
predicted step. Results: benchmarks/results/timeline_zoo.json and docs/timeline_zoo.md. Restartable.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
import zoo_models
from tabulate import tabulate

from floorplan.cost_models import arena
from floorplan.errors import FloorplanError
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step
from floorplan.methods.catalogue import METHODS, Options, Plan, method
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Source, subject_of
from floorplan.render import versions
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.timeline import measure, predict
from floorplan.timeline.blocks import StepTimeline, intervals
from floorplan.timeline.run import step_timeline

RESULTS, TABLE = ROOT / "benchmarks" / "results" / "timeline_zoo.json", ROOT / "docs" / "timeline_zoo.md"
HEADER = ["model", "methods", "exact", "largest difference (B)", "arena / max-live, worst", "arena s, worst", "not run"]


def rows(family: str, name: str, methods: list[str]) -> Iterator[dict[str, Any]]:
    """One row a method, and one for the compiled step."""
    sample = zoo_models.build(family, name)
    x = torch.randn(2, *sample.shape)
    s = subject_of(Source(sample.model.train(), x))
    for m in map(method, methods):
        row = {"family": family, "model": name, "method": m.name}
        try:
            gm = adapted(s, Plan(m.name, Options(2, "auto", 0, False)), verified=False)[0].gm
            gm.train(m.name != "zero-shot")
            inputs = filled(s.inputs, 2)
            y, loss = target_for(gm, inputs, "cross_entropy"), LOSSES["cross_entropy"]
            under_autograd = Step(gm, inputs, y, loss, replays=m.replays)
            p = step_timeline(under_autograd)
            yield row | found(p, step_timeline(under_autograd, fake=False))
            if m.name == "memflora":
                gm.eval()
                step = compile_step(gm, "cross_entropy", inputs, plan=Schedule())
                p = predict(step, inputs, y)
                yield row | {"method": "memflora, compiled"} | found(p, measure(step, inputs, y))
        except FloorplanError as e:
            yield row | {"refused": str(e)[:200]}
        except Exception as e:  # a model that fails is a row, not the end of the run
            yield row | {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}


def found(p: StepTimeline, m: StepTimeline) -> dict[str, Any]:
    """Peaks, whether every block agrees, and the arena of the predicted step."""
    start, spans = time.process_time(), intervals(p.blocks)
    placed = arena.place(spans)
    arena.verify(spans, placed)
    return {
        "predicted": p.peak,
        "measured": m.peak,
        "same_blocks": p.blocks == m.blocks,
        "blocks": len(spans),
        "arena": round(placed.ratio, 5),
        "seconds": round(time.process_time() - start, 2),
    }


def page(document: dict[str, Any]) -> str:
    """The table: one line a model."""
    models = list(dict.fromkeys((r["family"], r["model"]) for r in document["rows"]))
    lines, done = [], [r for r in document["rows"] if "predicted" in r]
    for key in models:
        own = [r for r in document["rows"] if (r["family"], r["model"]) == key]
        ran = [r for r in own if "predicted" in r]
        gaps = [abs(r["predicted"] - r["measured"]) for r in ran]
        failed = [f"{r['method']}: {r.get('refused') or r.get('error')}" for r in own if "predicted" not in r]
        lines.append(
            [
                key[1],
                len(own),
                sum(not g for g in gaps),
                max(gaps, default="-"),
                f"{max((r['arena'] for r in ran), default=0):.4f}",
                f"{max((r['seconds'] for r in ran), default=0):.1f}",
                "; ".join(f.split(": ")[0] for f in failed),
            ]
        )
    exact = sum(r["predicted"] == r["measured"] for r in done)
    blocks = sum(r["same_blocks"] for r in done)
    head = ", ".join(f"{k} {v}" for k, v in document["versions"].items())
    reasons = dict.fromkeys(r.get("refused") or r.get("error") for r in document["rows"] if "predicted" not in r)
    notes = "".join(f"- {' '.join(str(r).split())}\n" for r in list(reasons)[:40])
    return (
        "# Timelines of the zoo\n\n"
        f"Made by `python benchmarks/timeline_zoo.py` ({head}, CPU, float32); do not edit.\n\n"
        "One training step with cross entropy, batch 2, small images, rank 2, by every method (and MemFLoRA's\n"
        "compiled step): the requested peak predicted on fake tensors against a real run's, and the arena that\n"
        "holds the step.\n\n"
        f"{len(done)} steps ran: the peak is exact in {exact}, every block (birth, death, bytes, node) in {blocks}.\n\n"
        + tabulate(lines, HEADER, "github", disable_numparse=True)
        + ("\n\nWhy some were not run:\n\n" + notes if notes else "\n")
    )


def main() -> None:
    """Run what is asked for, writing after every model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", default="all")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true", help="skip models that have rows already")
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    document["versions"] = versions()
    families = zoo_models.FAMILIES if options.family == "all" else (options.family,)
    end = time.monotonic() + 60 * options.minutes
    for family, name in ((f, n) for f in families for n in zoo_models.names(f)):
        has = any((r["family"], r["model"]) == (family, name) for r in document["rows"])
        if (options.only and options.only != name) or (options.missing and has) or time.monotonic() > end:
            continue
        kept = [r for r in document["rows"] if (r["family"], r["model"]) != (family, name)]
        new = list(rows(family, name, options.methods.split(",")))
        document["rows"] = kept + new
        bad = [r for r in new if "predicted" not in r or r["predicted"] != r["measured"]]
        print(family, name, len(new), "steps;", bad or "exact", flush=True)
        RESULTS.write_text(json.dumps(document, indent=0))
        TABLE.write_text(page(document))


if __name__ == "__main__":
    main()
