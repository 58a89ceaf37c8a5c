"""Resident growth: how much memory the whole process takes more while one step runs, measured in a fresh one.

    parent: resident_growth("pkg.mod:function", arguments)   ->  python -m floorplan.budget.resident (a child)
    child:  step = function(**arguments);  step() once;  resident now, reset the kernel's high-water mark;
            step();  growth = high-water mark - resident

Kernels allocate what no dispatcher sees, so this is its own figure and stands beside the requested peak,
never in its place. The child's malloc returns what is freed: a large block is mapped by itself. The kernel
counts pages in batches of a thread, so figures are right to some hundred KB.
"""

import ctypes
import gc
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapter_rank
from floorplan.layers.bits import as_layout
from floorplan.ledger.losses import target_for
from floorplan.methods.catalogue import Plan
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Source, subject_of
from floorplan.step.compile import compile_step

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Growth:
    """Bytes of one process: what it held before the step, the most it held during it."""

    before: int
    most: int

    @property
    def growth(self) -> int:
        """What the step added at its most."""
        return self.most - self.before

    def __str__(self) -> str:
        return f"resident growth {self.growth:,}"


def resident_growth(
    spec: str, arguments: Mapping[str, Any] | None = None, *, threads: int | None = None, timeout: float = 600
) -> Growth:
    """Run the step that `spec` ("pkg.mod:function") makes from JSON arguments in a fresh process.

    The function returns a callable without arguments. It runs once to warm up, so it has to leave nothing
    behind that the next run would find (gradients are set to None at the end). FloorplanError where the system
    has no /proc, or with the child's last line if it fails.
    """
    if not (STATUS.exists() and os.access(CLEAR, os.W_OK)):
        way_out = "run it on Linux, or leave it out: the requested peak does not need it"
        raise FloorplanError(f"resident growth: unavailable, {CLEAR} cannot be written here; {way_out}")
    task = json.dumps({"spec": spec, "arguments": dict(arguments or {}), "threads": threads})
    paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command, env = [sys.executable, "-m", __name__, task], os.environ | MALLOC | {"PYTHONPATH": paths}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as e:
        raise FloorplanError(f"resident growth: {spec}: not done after {timeout:g} s; give it longer") from e
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise FloorplanError(f"resident growth: {spec}: {why[:300]}")
    return Growth(**json.loads(lines[-1]))


def growth_of(step: Call) -> Growth:
    """Measure a step in this process: once to warm up, once with the high-water mark reset."""
    step()
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR.write_text("5")
    except OSError as e:
        raise FloorplanError(f"resident growth: unavailable, {CLEAR}: {e.strerror}") from e
    before = _kilobytes("VmRSS")
    step()
    return Growth(1024 * before, 1024 * _kilobytes("VmHWM"))


def _kilobytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise FloorplanError(f"resident growth: unavailable, {STATUS} has no {name}")
    return int(found[1])


def compiled_step(
    model: str,
    batch: int,
    schedule: Mapping[str, Any] | None = None,
    loss: str = "cross_entropy",
    plan: Mapping[str, Any] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
) -> Call:
    """The step that compile_step makes by a schedule (`Schedule.as_dict()`), on random inputs in its own layout.

    model: a file or factory, adapted here unless it already is. plan: by what (`Plan.as_dict()`); None: MemFLoRA.
    shapes: of one sample, once for each input, where the model does not tell.
    """
    s = subject_of(Source(model, None, batch, shapes))
    gm: Any = s.model
    if adapter_rank(gm) is None:
        gm = adapted(s, Plan.of(plan or {"method": "memflora"}), verified=False)[0].gm
    compiled = compile_step(gm, loss, s.inputs, plan=dict(schedule or {}))
    images = [isinstance(t, torch.Tensor) and t.dim() == 4 for t in s.inputs]
    inputs = [as_layout(t, compiled.layout) if k else t for t, k in zip(s.inputs, images, strict=True)]
    target = target_for(gm, s.inputs, loss)

    def step() -> None:
        compiled(*inputs, target)
        gm.zero_grad(set_to_none=True)

    return step


def main(task: str) -> None:
    """What the child does: measure, and print one line of JSON."""
    given = json.loads(task)
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    module, _, function = given["spec"].partition(":")
    step = getattr(importlib.import_module(module), function)(**given["arguments"])
    print(json.dumps(vars(growth_of(step))))


if __name__ == "__main__":
    main(sys.argv[1])
