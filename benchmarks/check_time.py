"""Cost of the full symbolic proof against one concrete fake run of the same model; and growth with depth.

    python benchmarks/check_time.py           -> docs/check_time.md

Warm figures are medians in one process. Cold ones are a whole process less its imports, in which torch makes its
kernels and caches for the first time. MobileNetV2 comes from examples/; the others need torchvision and are left out,
aloud, without it.
"""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import backbones

import floorplan
from floorplan.graph.trace import trace
from floorplan.ledger.analyze import analyze
from floorplan.ledger.run import Step, Watch, run


def timed(run: Callable[[], object], rounds: int = 3) -> float:
    """Median CPU seconds after one warm-up."""
    run()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Name -> (model, input shape)."""
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "mobilenet_v2 (97x60)": (backbones.mobilenet_v2(), (8, 1, 97, 60))
    }
    try:
        import torchvision
    except ImportError:
        print("torchvision is not installed: the ResNets are left out", file=sys.stderr)
        return found
    for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "densenet121", "densenet201"):
        found[name] = (getattr(torchvision.models, name)(weights=None), (8, 3, 224, 224))
    return found


def chains() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Layers of conv, BatchNorm and ReLU, one after another."""

    def layer() -> list[nn.Module]:
        return [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]

    chain = {n: nn.Sequential(*(m for _ in range(n) for m in layer())) for n in (100, 400, 1600)}
    return {f"{n} layers": (m, (8, 8, 16, 16)) for n, m in chain.items()}


def measured(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, float, float]:
    """Nodes, the whole analysis over the concrete fake forward, and its seconds a node."""
    x = torch.empty(shape)
    traced = trace(model, (x,))
    nodes = len(traced.gm.graph.nodes)
    concrete = timed(lambda: run(Step(traced.gm, (x,)).forward, Watch(hooks=True)))
    whole = timed(lambda: analyze(traced, (x,), real=model, really=True))
    return nodes, whole / concrete, whole / nodes


def cold(name: str, what: str) -> float:
    """CPU seconds of one `check` of a torchvision model at 224x224, or of one concrete fake run, in a new process."""
    command = [sys.executable, __file__, name, what]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return statistics.median(float(r) for r in runs)


def once(name: str, what: str) -> float:
    """What `cold` runs in the child: seconds from the end of the imports on, less the model's own construction."""
    import torchvision

    model, x = getattr(torchvision.models, name)(weights=None), torch.empty(8, 3, 224, 224)
    if what == "fake":
        gm = trace(model, (x,)).gm
    start = time.process_time()
    if what == "fake":
        run(Step(gm, (x,)).forward, Watch(hooks=True))
    else:
        floorplan.check(model, x)
    return time.process_time() - start


def main() -> None:
    """Print the table and write docs/check_time.md."""
    torch.set_num_threads(2)
    found = {name: measured(m, shape) for name, (m, shape) in (models() | chains()).items()}
    unit = found.get("resnet18", next(iter(found.values())))[2]
    rows = [[name, str(n), f"{r:.1f}", f"{each / unit:.2f}"] for name, (n, r, each) in found.items()]
    header = ["model", "nodes", "check / concrete fake run", "time a node, resnet18 = 1.00"]
    colds = [[n, f"{cold(n, 'check') / cold(n, 'fake'):.1f}"] for n in ("mobilenet_v2", "resnet50")]
    dense = cold("densenet201", "check") / cold("resnet152", "check")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    text = (
        "# Cost of the proof\n\n`check` runs the graph on fake tensors: exact sizes under hooks, "
        "the model's own step, and symbolic sizes with a batch on the other side of torch's guards. "
        "The unit is one concrete fake forward under hooks.\n\n"
        f"Command: `python benchmarks/check_time.py`; {versions}.\n\n"
        + tabulate(rows, headers=header, tablefmt="github", disable_numparse=True)
        + "\n\nIn a new process, imports apart, at [8, 3, 224, 224]:\n\n"
        + tabulate(colds, headers=["model", "check / concrete fake run"], tablefmt="github", disable_numparse=True)
        + f"\n\n`check` of DenseNet-201 takes {dense:.1f} of ResNet-152's CPU time.\n"
    )
    print(text)
    (ROOT / "docs" / "check_time.md").write_text(text)


if __name__ == "__main__":
    print(once(*sys.argv[1:])) if len(sys.argv) > 1 else main()
