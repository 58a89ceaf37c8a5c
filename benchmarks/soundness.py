"""False verdicts of AT_FLOOR over a generated family of models, each held against hooks on real runs at many sizes.

python benchmarks/soundness.py [COUNT]           -> docs/soundness.md (COUNT: 1000)
"""

import platform
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "nets")]

from sized_nets import full_map_at, member

import floorplan


def main(count: int) -> None:
    """Print the counts and write docs/soundness.md."""
    torch.set_num_threads(1)
    verdicts: Counter[str] = Counter()
    false: list[int] = []
    never = 0
    for seed in range(count):
        verdict = floorplan.check(member(seed), torch.randn(6, 3, 16, 16)).verdict
        kept = full_map_at(member(seed), seed)
        verdicts[verdict] += 1
        never += kept is None
        if verdict == "AT_FLOOR" and kept is not None:
            false.append(seed)
            print(f"seed {seed}: AT_FLOOR, and a full map is kept at {kept}", flush=True)
    rows = "".join(f"| {verdict} | {n} |\n" for verdict, n in sorted(verdicts.items()))
    text = (
        "# False verdicts\n\nModels with branches on sizes, ints of sizes, growing state, modes and untraced parts, "
        "at random; each verdict held against saved-tensor hooks on real forwards at 12 sizes.\n\n"
        f"Command: `python benchmarks/soundness.py {count}`; torch {torch.__version__}, "
        f"Python {platform.python_version()}.\n\n"
        f"| verdict | of {count} models |\n|---|---|\n{rows}\n"
        f"No full map at any size tried: {never}. AT_FLOOR that is false: {len(false)}.\n"
    )
    print(text)
    (ROOT / "docs" / "soundness.md").write_text(text)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
