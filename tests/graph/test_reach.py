"""Which layers a gradient can reach, as the graph says."""

from typing import Any

import pytest
import torch
from torch import nn
from traced_nets import Net, conv

from floorplan.graph.reach import cut_off
from floorplan.graph.trace import trace

X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("fn", "cut"),
    [
        (lambda s, x: s.c(x) + s.t(x), set()),
        (lambda s, x: s.c(x) + s.t(x).detach(), {"t"}),
        (lambda s, x: s.c(x) + torch.detach(s.t(x)), {"t"}),
        (lambda s, x: s.c(x) + s.t(x).data, {"t"}),
        (lambda s, x: s.c(x) * (s.t(x) > 0), {"t"}),
        (lambda s, x: s.c(x).gather(1, s.t(x).argmax(1, keepdim=True)), {"t"}),
        (lambda s, x: s.c(s.t(x).detach()), {"t"}),
        (lambda s, x: (s.c(x), s.t(x).detach().sigmoid()), {"t"}),
        (lambda s, x: s.c(x) + s.t(x) + s.t(x).detach(), set()),
        (lambda s, x: s.t(x).new_zeros(s.t(x).shape) + s.c(x), set()),
        (lambda s, x: s.c(x).add_(s.t(x)), set()),
    ],
)
def test_what_is_only_used_detached_is_cut_off(fn: Any, cut: set[str]) -> None:
    assert cut_off(trace(Net(fn, c=conv(), t=conv()), [X]).gm) == cut


def test_a_write_whose_result_nobody_reads_counts() -> None:
    def fn(s: Any, x: Any) -> Any:
        y = s.c(x)
        y[:, :1] += s.t(x)[:, :1]
        return y

    assert cut_off(trace(Net(fn, c=conv(), t=conv()), [X]).gm) == set()
    assert cut_off(trace(nn.Sequential(conv(), nn.ReLU()), [X]).gm) == set()
