"""Multiply-adds of one training step by the MemFLoRA paper's convention (Table 5): numbers in, numbers out.

forward      convs and linear layers, adapters at the positions where they compute
input grads  as many again, the first layer not left out
weight grads of the trained factors alone
merging      r*|W| a step, not a sample, each time an adapter is multiplied out
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Macs:
    """Multiply-adds of one layer a sample, and of one merge of its adapter."""

    base: int  # the frozen or plain layer
    adapter: int = 0  # its factors, where they run beside it
    trained: int = 0  # gradients of what trains in it
    merge: int = 0  # rank * elements of the weight, if the adapter is multiplied out on the fly


def forward(layers: Sequence[Macs]) -> int:
    """Of one sample."""
    return sum(x.base + x.adapter for x in layers)


def step(layers: Sequence[Macs], batch: int, merges: int = 0, replays: bool = False) -> int:
    """Of one step; `merges` is how often every adapter is multiplied out in it."""
    sample = 2 * forward(layers) + sum(x.trained for x in layers)
    sample += forward(layers) if replays else 0
    return batch * sample + merges * sum(x.merge for x in layers)
