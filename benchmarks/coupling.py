"""Steps in parts of random nets, with and without samples that touch, by all losses: exact or refused, none wrong.

python benchmarks/coupling.py [--nets 500] [-o docs/coupling.md]
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "help")]

from losses import named, others  # noqa: E402
from mixing import tried  # noqa: E402


def main() -> None:
    """Try them, and write the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nets", type=int, default=500)
    options.add_argument("-o", default=str(ROOT / "docs" / "coupling.md"))
    given = options.parse_args()
    warnings.simplefilter("ignore")
    found = [tried(seed, lambda shape: [*named(shape), *others(shape)]) for seed in range(given.nets)]
    count = Counter((f.kind, f.touch) for f in found)
    exact = [f for f in found if f.kind == "exact"]
    worst, odd_peaks = max((f.error for f in exact), default=0.0), [f for f in exact if f.predicted != f.allocated]
    lines = [
        "# Steps in parts: exact or refused",
        "",
        f"{given.nets} random nets × losses × schedules in float64, loss and gradients against autograd on the whole",
        f"batch (`python benchmarks/coupling.py`, torch {torch.__version__}).",
        "",
        "| samples | exact (≤ 1e-10) | refused by name | wrong |",
        "|---|---|---|---|",
    ]
    for touch, name in ((True, "touch"), (False, "apart")):
        lines.append(f"| {name} | " + " | ".join(str(count[k, touch]) for k in ("exact", "refused", "wrong")) + " |")
    lines += ["", f"Largest relative error of what is exact: {worst:.1e}. Requested peak of the first call, counted by"]
    lines += [f"a dispatch mode of its own, as predicted: {len(exact) - len(odd_peaks)} of {len(exact)}.", ""]
    odd = [f"- {f.kind}: {f.words}" for f in found if f.kind == "wrong" or (f.kind == "refused") != f.touch]
    odd += [f"- {f.words}: predicted {f.predicted:,}, allocated {f.allocated:,}" for f in odd_peaks]
    Path(given.o).write_text("\n".join([*lines, *odd, *([""] if odd else [])]), encoding="utf-8")
    print("\n".join(lines))
    sys.exit(any(f.kind == "wrong" for f in found) or bool(odd_peaks))


if __name__ == "__main__":
    main()
