"""Time of a training step of each method's own op against the same formula in plain autograd.

    python benchmarks/method_time.py          -> docs/method_time.md

Both sides run in turn in one process; ratios are medians of pairs. "plain" is the method written with torch's
own differentiable ops (and, for the BatchNorm-folding methods, the same fold); `memflora` also stands against
the published two-branch form, `memflora-paper`.
"""

import argparse
import copy
import platform
import sys
from pathlib import Path

import torch
from paired import paired, step
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import backbones

import floorplan
from floorplan.methods.verify import randomize_adapters, set_plain

SHAPES = {"t_resnet": (97, 60), "mobilenet_v2": (1, 97, 60)}
OWN = ("lora-edge", "lora-fa", "memflora-paper", "memflora")


def adapted(backbone: str, method: str, x: Tensor) -> nn.Module:
    """The backbone under a method, its adapters drawn at random."""
    torch.manual_seed(0)
    model = getattr(backbones, backbone)()
    module = floorplan.rewrite(model, x[:2], method=method, measured=False).module
    randomize_adapters(module)
    return module.train()


def rows(backbone: str, batch: int, rounds: int) -> list[list[str]]:
    """Own op over plain autograd for every method with an op, and memflora over its published form."""
    x, y = torch.randn(batch, *SHAPES[backbone]), torch.randint(0, 17, (batch,))
    found, modules = [], {}
    for method in OWN:
        own = modules[method] = adapted(backbone, method, x)
        plain = copy.deepcopy(own)
        set_plain(plain, True)
        ratio = paired({"plain": step(plain, x, y), "own": step(own, x, y)}, "plain", rounds)["own"]
        found.append([backbone, str(batch), f"{method} / the same in plain autograd", f"{ratio:.2f}"])
    sides = {m: step(modules[m], x, y) for m in ("memflora-paper", "memflora")}
    ratio = paired(sides, "memflora-paper", rounds)["memflora"]
    found.append([backbone, str(batch), "memflora / memflora-paper", f"{ratio:.2f}"])
    return found


def main() -> None:
    """Print the table and write docs/method_time.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [r for b in SHAPES for r in rows(b, options.batch, options.rounds)]
    header = ["backbone", "batch", "step time", "ratio"]
    table = tabulate(lines, headers=header, tablefmt="github", disable_numparse=True)
    text = (
        "# Step time of the methods, paired\n\nOne forward and backward at rank 2, medians of paired ratios.\n\n"
        f"Command: `python benchmarks/method_time.py --threads {options.threads}`; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {options.threads} threads, {options.rounds} rounds.\n\n{table}\n"
    )
    print(text)
    (ROOT / "docs" / "method_time.md").write_text(text)


if __name__ == "__main__":
    main()
