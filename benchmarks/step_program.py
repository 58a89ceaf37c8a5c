"""One training step, by schedule: requested peak, resident growth, gradients and time against full fine-tuning.

    python benchmarks/step_program.py                    -> benchmarks/results/step_program.json, docs/step_program.md
    python benchmarks/step_program.py --net t_resnet --cells memory gradients --rows compiled
    python benchmarks/step_program.py --table            the page again from what was measured

Every finished cell is written down, and not measured again unless --again is given or its row has changed.
Times are medians of pairs with full fine-tuning, in one process; run them on a quiet machine.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from paired import ratios

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from step_nets import NETS, RANK, Net
from step_rows import Row, adapted_graph, laid_out, make, rows_of, schedule_of, visible_graphs
from step_table import page
from torch import Tensor, fx, nn

from floorplan.budget.resident import resident_growth
from floorplan.errors import FloorplanError
from floorplan.files import write_text
from floorplan.graph.trace import trace
from floorplan.ledger.losses import LOSSES
from floorplan.ledger.run import Step, run
from floorplan.methods.verify import set_plain
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.timeline import measure, predict, whole_op_bound
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.run import step_timeline, timeline_of
from floorplan.torch_doors import model_state

RESULTS = ROOT / "benchmarks" / "results" / "step_program.json"
PAGE = ROOT / "docs" / "step_program.md"
MARK = "<!-- made by benchmarks/step_program.py; do not edit below -->"
CELLS = ("memory", "gradients", "resident", "time")


def memory(net: Net, row: Row) -> dict[str, Any]:
    """Peaks of one step in bytes, predicted and measured, and what stands apart."""
    made = make(net, row)
    x, y = made.x, made.y
    predicted: StepTimeline | None = None
    measured: StepTimeline | None = None
    if made.step is not None:
        predicted, measured = predict(made.step, (x,), y), measure(made.step, (x,), y)
    elif row.kind in ("full", "autograd"):
        gm = made.model if isinstance(made.model, fx.GraphModule) else trace(made.model, (x,)).gm
        step = Step(gm, (x,), y, LOSSES["cross_entropy"])
        predicted, measured = (step_timeline(step, fake=fake) for fake in (True, False))
    elif row.kind != "inductor":  # whose kernels allocate unseen
        made.run()
        with visible_graphs():
            step = Step(made.model, (x,), y, drive=lambda *_: made.run())
            measured = timeline_of(run(step, fake=False), row.name)
    streams = bool(made.step and made.step.schedule.stream)  # runs no op whole
    return {
        "predicted": predicted.peak if predicted else None,
        "measured": measured.peak if measured else None,
        "same": _same(predicted, measured) if predicted and measured else None,
        "bound": whole_op_bound(measured) if made.step and measured and not streams else None,
        "state": _state(made.model, x, y),
    }


def _same(a: StepTimeline, b: StepTimeline) -> bool:
    """Whether every storage's bytes, birth and death agree."""
    return [(s.born, s.died, s.nbytes) for s in a.blocks] == [(s.born, s.died, s.nbytes) for s in b.blocks]


def _state(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, int]:
    """Bytes of what stands apart: the model, Adam's moments, the caller's batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return {"model": _bytes(model_state(model)), "optimizer": 2 * _bytes(trained), "batch": _bytes([x, y])}


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def gradients(net: Net, row: Row) -> dict[str, Any] | None:
    """Largest error of a compiled step's gradients over the largest gradient of plain autograd, in float64."""
    if row.kind != "compiled":
        return None
    samples, smaller = net.checked
    plan = schedule_of(row, adapted_graph(net), net.samples(net.batch)[0])
    x, y = net.samples(samples)
    gm, x = adapted_graph(net, torch.float64, draws=False), laid_out(x.double(), row.layout)
    set_plain(gm, True)
    nn.functional.cross_entropy(gm(x), y).backward()  # type: ignore[no-untyped-call]
    want = _taken(gm)
    set_plain(gm, False)
    compile_step(gm, "cross_entropy", x, plan=scaled(plan, smaller))(x, y)
    got = _taken(gm)
    if got.keys() != want.keys() or not want:
        raise FloorplanError(f"{row.name}: gradients of {sorted(got.keys() ^ want.keys())[:3]} on one side only")
    largest = max(float(g.abs().max()) for g in want.values())
    return {"error": max(float((got[n] - g).abs().max()) for n, g in want.items()) / largest, "samples": samples}


def scaled(plan: Schedule, by: int) -> Schedule:
    """The schedule with its part sizes divided, so that a smaller batch has as many parts."""

    def less(size: int) -> int:
        return max(1, size // by) if size else 0

    stages = tuple((node, less(size)) for node, size in plan.stages)
    return replace(plan, micro_batch=less(plan.micro_batch), stages=stages, last=less(plan.last))


def _taken(gm: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in gm.named_parameters() if p.grad is not None}
    gm.zero_grad(set_to_none=True)
    return found


def resident(net: Net, row: Row, threads: int) -> dict[str, Any]:
    """What the whole process takes more during a step, in a fresh process."""
    key = next(k for k, n in NETS.items() if n is net)
    given: dict[str, Any] = {"net": key, "row": row.name}
    spec = "step_rows:fresh"
    if row.kind == "compiled":
        plan = schedule_of(row, adapted_graph(net), net.samples(net.batch)[0])
        spec = "floorplan.budget.resident:compiled_step"
        given = {
            "model": net.factory,
            "batch": net.batch,
            "shapes": [net.shape],
            "plan": {"method": "memflora", "rank": RANK, "sites": net.sites},
            "schedule": plan.as_dict(),
        }
    return {"bytes": resident_growth(spec, given, threads=threads, timeout=1800).growth}


def timed(net: Net, row: Row, rounds: int, base: Row) -> dict[str, Any]:
    """Wall and CPU time over the base row's, medians of pairs."""
    if row == base:
        return {"wall": 1.0, "cpu": 1.0, "rounds": rounds}
    sides = {"base": make(net, base).run, "row": make(net, row).run}
    found = ratios(sides, "base", rounds)["row"]
    return {"wall": found.wall, "cpu": found.cpu, "rounds": rounds}


class Store:
    """The results, written whole after every cell; a net's figures are of one set of versions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read()

    def read(self) -> None:
        """What the file holds now: another run may have written to it."""
        self.document: dict[str, Any] = {"schema": "floorplan.step_program/1", "nets": {}}
        if self.path.exists():
            self.document = json.loads(self.path.read_text())

    def cells(self, net: str, row: Row) -> dict[str, Any]:
        """The row's cells as the file holds them; empty ones if it, or a version, has changed."""
        self.read()
        now = versions()
        found = self.document["nets"].setdefault(net, {"title": NETS[net].title, "versions": now, "rows": {}})
        if found["versions"] != now:
            print(f"{net}: measured with {found['versions']}; starts anew")
            found.update(versions=now, rows={})
        entry = found["rows"].setdefault(row.name, {"made": row.made, "cells": {}})
        if entry["made"] != row.made:
            entry.update(made=row.made, cells={})
        order = list(rows_of(net))
        found["rows"] = {k: found["rows"][k] for k in order if k in found["rows"]}
        cells: dict[str, Any] = entry["cells"]
        return cells

    def write(self) -> None:
        """The file, and the page's table."""
        nets = {k: self.document["nets"][k] for k in NETS if k in self.document["nets"]}
        self.document["nets"] = nets
        write_text(self.path, json.dumps(self.document, indent=1) + "\n")
        prose = PAGE.read_text().partition(MARK)[0] if PAGE.exists() else "# The compiled step\n\n"
        write_text(PAGE, f"{prose}{MARK}\n\n{page(self.document)}\n")


def versions() -> dict[str, str]:
    """What the figures depend on."""
    found = {"torch": torch.__version__, "Python": platform.python_version()}
    try:
        return found | {"torchvision": metadata.version("torchvision")}
    except metadata.PackageNotFoundError:
        return found


def jobs(net: Net, row: Row, base: Row, o: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any] | None]]:
    """What the chosen cells of a row are measured by."""
    every: dict[str, Callable[[], dict[str, Any] | None]] = {
        "memory": lambda: memory(net, row),
        "gradients": lambda: gradients(net, row),
        "resident": lambda: resident(net, row, o.threads),
        "time": lambda: timed(net, row, o.rounds, base),
    }
    return {f"{c} {o.threads}" if c in ("resident", "time") else c: every[c] for c in CELLS if c in o.cells}


def work(store: Store, name: str, row: Row, o: argparse.Namespace) -> None:
    """Measure what is missing of a row; what fails is noted with its reason, and tried again next time."""
    base = next(iter(rows_of(name).values()))
    for cell, job in jobs(NETS[name], row, base, o).items():
        if "failed" not in store.cells(name, row).get(cell, {"failed": ""}) and not o.again:
            continue
        start = time.perf_counter()
        try:
            value = job()
        except Exception as e:
            value = {"failed": f"{type(e).__name__}: {e}".strip().splitlines()[0][:200]}
        if value is not None:
            store.cells(name, row)[cell] = value
            store.write()
            print(f"{name} | {row.name} | {cell} ({time.perf_counter() - start:.0f} s) {value}", flush=True)


def main() -> None:
    """Measure the chosen cells of the chosen rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", nargs="*", choices=list(NETS), default=list(NETS))
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--cells", nargs="*", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure finished cells anew")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    store = Store(RESULTS)
    for name in [] if options.table else options.net:
        if NETS[name].missing:
            print(f"{name}: left out, {NETS[name].missing}")
            continue
        for row in rows_of(name).values():
            if options.rows in row.name:
                work(store, name, row, options)
    store.read()
    store.write()


if __name__ == "__main__":
    main()
