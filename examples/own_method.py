"""LoRA-XS (arXiv 2405.17604) on convs as a method of one's own: layer, pass, method, and a run through floorplan.

y = conv(x, W) + b + B R conv(x, A)    B A: W (O, I*k) by its top r singular vectors, frozen; the core R (r, r) trains
"""

import tempfile

import torch
from torch import Tensor, nn

import floorplan
from floorplan.layers.geometry import conv1x1, frozen_conv
from floorplan.passes import canonicalize, compact_pools, insert_adapter, pack_gates


class XsConv(floorplan.ConvAdapter):
    starts_at_zero = ("R",)

    def make(self, weight: list[int]) -> None:
        self.A, self.B = nn.Buffer(torch.zeros(self.rank, *weight[1:])), nn.Buffer(torch.zeros(weight[0], self.rank))
        self.R = nn.Parameter(torch.zeros(self.rank, self.rank))

    def start(self, generator: torch.Generator) -> None:
        left, values, right = torch.linalg.svd(self.weight.flatten(1), full_matrices=False)
        self.A.copy_(right[: self.rank].view_as(self.A))
        self.B.copy_(left[:, : self.rank] * values[: self.rank])

    def axes(self) -> dict[str, str]:
        return {"A": "rC", "B": "Cr", "R": "rr"}  # r the rank, C a width

    def delta(self) -> Tensor:
        return torch.mm(self.B @ self.R, self.A.flatten(1)).view_as(self.weight)

    def run(self, x: Tensor) -> Tensor:
        t = frozen_conv(x, self.A, None, self.geo)  # r channels; nothing of x is kept
        return frozen_conv(x, self.weight, self.bias, self.geo) + conv1x1(t, self.B @ self.R)


def passes(o: floorplan.Options) -> tuple[floorplan.Pass, ...]:
    lora_xs = insert_adapter.adapter("lora-xs", XsConv.of, o.rank, o.sites, o.seed, o.train_head)
    return canonicalize.PASS, lora_xs, pack_gates.PASS, compact_pools.PASS


METHOD = floorplan.Method("lora-xs", "a trained core between frozen singular vectors", passes)


def main() -> None:
    floorplan.register(METHOD)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 800, (8,))
    print(floorplan.check(net, x, rank=2, method="lora-xs"))
    adapted = floorplan.rewrite(net, x, rank=2, method="lora-xs").module
    print(floorplan.adapt(adapted, [(x, y)], method="lora-xs", steps=5).log.losses)
    with tempfile.TemporaryDirectory() as folder:
        floorplan.save(adapted, f"{folder}/adapted.pt")
        print(floorplan.merge(floorplan.load(f"{folder}/adapted.pt", allow=("own_method",))))


if __name__ == "__main__":
    __import__("own_method").main()  # so that a file names the layer own_method.XsConv
