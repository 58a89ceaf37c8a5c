"""Time of one training step, forward and backward: full fine-tuning against MemFLoRA's two forms.

    python benchmarks/step_time.py            -> docs/step_time.md

All sides run in turn in one process, contiguous, MobileNetV2 at 97x60; ratios are medians of pairs.
The two-branch form is the paper's: the branch conv(q, U) at full width added to the frozen conv's output,
with the same fused activation, gate and folded BatchNorm.
"""

import argparse
import copy
import platform
import sys
from pathlib import Path

import torch
from paired import paired, step
from tabulate import tabulate
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import backbones

import floorplan
from floorplan.layers.bits import apply_gate, layout_of, pack_gate
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import conv, conv_input_grad, conv_weight_grad, pad, unpad
from floorplan.layers.lowrank import project, up_geometry
from floorplan.methods.verify import randomize_adapters


class TwoBranch(torch.autograd.Function):
    """y = act(conv(x, W) + b + conv(q, a*U) [+ skip]); keeps q and the packed gate."""

    @staticmethod
    def forward(ctx, x, skip, up, site):  # type: ignore[no-untyped-def]
        geo = site.geo
        z = conv(pad(x, geo), site.weight, site.bias, geo, geo.groups)
        q = project(x, site.P, geo)
        scaled = up * site.scale.reshape(-1, 1, 1, 1) if site.scale is not None else up
        z += conv(pad(q, geo), scaled, None, up_geometry(geo), geo.groups)
        if skip is not None:
            z += skip
        packed = None
        if site.act is not None:
            ctx.layout = layout_of(z)
            packed = pack_gate(z, site.gate.lo, site.gate.hi, site.gate.closed)
            z = site.act(z)
        ctx.site, ctx.size, ctx.skip = site, x.shape[2:], skip is not None
        ctx.save_for_backward(up, q, packed)
        return z

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        up, q, packed = ctx.saved_tensors
        site, geo = ctx.site, ctx.site.geo
        if packed is not None:
            g = apply_gate(g, packed, ctx.layout, site.gate.inside, site.gate.outside)
        scaled = up * site.scale.reshape(-1, 1, 1, 1) if site.scale is not None else up
        gu = conv_weight_grad(g, q, scaled, up_geometry(geo), geo.groups)
        gu = gu * site.scale.reshape(-1, 1, 1, 1) if site.scale is not None else gu
        gx = None
        if ctx.needs_input_grad[0]:
            gq = conv_input_grad(g, scaled, q.shape[2:], up_geometry(geo), geo.groups)
            p = site.P.flatten(0, 1)[:, :, None, None]
            gx = conv_input_grad(g, site.weight, ctx.size, geo, geo.groups)
            gx += torch.nn.functional.conv_transpose2d(gq, p)
            gx = unpad(gx, geo)
        return gx, (g if ctx.skip else None), gu, None


def two_branch(module: nn.Module) -> nn.Module:
    """A copy whose adapted sites run as two branches."""
    twin = copy.deepcopy(module)
    for m in twin.modules():
        if isinstance(m, FusedConv) and m.rank:
            m._run = lambda x, skip, m=m: TwoBranch.apply(x, skip, m.U, m)  # type: ignore[method-assign]
    return twin


def row(batch: int, rounds: int) -> list[str]:
    """One batch size: ratios to full fine-tuning and to the two-branch form."""
    x, y = torch.randn(batch, 1, 97, 60), torch.randint(0, 17, (batch,))
    full = backbones.mobilenet_v2().train()
    adapted = floorplan.rewrite(backbones.mobilenet_v2(), x[:2], rank=2, measured=False).module
    randomize_adapters(adapted)
    branches = two_branch(adapted)
    assert torch.allclose(adapted.eval()(x), branches.eval()(x), rtol=1e-3, atol=1e-4)
    sides = {
        "full": step(full, x, y),
        "two-branch": step(branches.train(), x, y),
        "rewritten": step(adapted.train(), x, y),
    }
    ratios = paired(sides, "full", rounds)
    against = paired({k: sides[k] for k in ("two-branch", "rewritten")}, "two-branch", rounds)
    return [
        str(batch),
        "1.00",
        f"{ratios['two-branch']:.2f}",
        f"{ratios['rewritten']:.2f}",
        f"{against['rewritten']:.2f}",
    ]


def main() -> None:
    """Print the table and write docs/step_time.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = ["batch", "full fine-tuning", "two-branch / full", "rewritten / full", "rewritten / two-branch"]
    table = tabulate(
        [row(b, options.rounds) for b in options.batch], headers=header, tablefmt="github", disable_numparse=True
    )
    text = (
        "# Step time, paired\n\nMobileNetV2 (examples/backbones.py) at 97x60, rank 2, pointwise sites, "
        "CPU, contiguous: one forward and backward, medians of paired ratios.\n\n"
        f"Command: `python benchmarks/step_time.py --threads {options.threads}`; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {options.threads} threads, {options.rounds} rounds.\n\n{table}\n"
    )
    print(text)
    (ROOT / "docs" / "step_time.md").write_text(text)


if __name__ == "__main__":
    main()
