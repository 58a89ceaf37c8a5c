"""A fake nn.LSTM keeps what a real one on the CPU does, its workspace too."""

from typing import Any

import pytest
import torch
from torch import nn

from floorplan.ledger.run import Step, Watch, run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False},
        {"num_layers": 2, "dropout": 0.5},
        {"proj_size": 2},  # runs unfused
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_bytes_of_an_lstm(options: dict[str, Any], backward: bool) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 5, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]  # type: ignore[no-any-return]

    gm = torch.fx.symbolic_trace(First())
    step = Step(gm, (torch.randn(4, 2, 3),), backward=backward)
    fake, real = (run(step, Watch(hooks=True), fake=f) for f in (True, False))
    kept = [[(s.shape, s.dtype, int(s.nbytes)) for s in r.saved] for r in (fake, real)]
    assert kept[0] == kept[1] and kept[0]
