"""Memory figures of one training step, in bytes: numbers in, numbers out."""

from collections.abc import Iterable
from dataclasses import dataclass

ADAM_MOMENTS = 2  # Adam keeps two values, of the parameter's dtype, for every trainable element


@dataclass(frozen=True)
class SavedBytes:
    """One kept tensor: its storage's number and bytes, and its own bytes."""

    storage: int
    storage_bytes: int
    tensor_bytes: int


def saved(tensors: Iterable[SavedBytes]) -> int:
    """Distinct storages: what the tensors really hold in memory (the paper's Table 6)."""
    return sum({t.storage: t.storage_bytes for t in tensors}.values())


def saved_refcount(tensors: Iterable[SavedBytes]) -> int:
    """Each tensor once per op that saved it (the paper's Table 3)."""
    return sum(t.tensor_bytes for t in tensors)


def optimizer_state(trainable_bytes: int) -> int:
    """Adam's two moments."""
    return ADAM_MOMENTS * trainable_bytes


@dataclass(frozen=True)
class ReplaySite:
    """Bytes of one replayed site: the kept dL/dq, the gradient of P, the full-width input."""

    captured: int
    projection: int
    entered: int


def replay_peak(sites: Iterable[ReplaySite]) -> int:
    """Most that a replay holds: all dL/dq, the gradients of P so far, and one input (MemFLoRA-SG)."""
    sites = list(sites)
    captured = sum(s.captured for s in sites)
    gradients = 0
    most = captured + sum(s.projection for s in sites)
    for s in sites:
        gradients += s.projection
        most = max(most, captured + gradients + s.entered)
    return most


def training_state_peak(model_bytes: int, trainable_bytes: int, live_peak: int) -> int:
    """Model, optimizer state, and the most that saved tensors and gradients hold together."""
    return model_bytes + optimizer_state(trainable_bytes) + live_peak
