"""Which values share memory, and who writes into it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from floorplan.graph.aliases import roots_of, written


class Writers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu_, self.drop, self.relu = nn.ReLU(True), nn.Dropout(0.5, True), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        a = x * 2
        v = a.view(-1)
        self.relu_(a)
        self.drop(a)
        F.relu(a, True)
        v.mul_(2)
        torch.relu_(v)
        v.copy_(x)
        torch.add(v, v, out=v)
        return self.relu(a), torch.sigmoid(a)


def test_who_writes_where() -> None:
    gm = fx.symbolic_trace(Writers())
    roots = roots_of(gm)
    names = {n.name: {r.name for r in written(gm, n, roots)} for n in gm.graph.nodes}
    assert {n for n, w in names.items() if "mul" in w} == {"relu_", "drop", "relu", "mul_", "relu__1", "copy_", "add"}
    assert {n for n, w in names.items() if not w} >= {"mul", "view", "relu_1", "sigmoid"}
