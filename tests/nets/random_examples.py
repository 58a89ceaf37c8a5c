"""Networks drawn at random with a rank and a choice of sites."""

from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from random_cnns import networks
from random_layers import Spec, batch, network
from torch import Tensor

PROFILE = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def tensors(out: Any) -> list[Tensor]:
    """The outputs of a network."""
    return list(out) if isinstance(out, tuple) else [out]


def loss(out: Any, seed: int = 3) -> Tensor:
    """A fixed random weighting of the outputs."""
    g = torch.Generator().manual_seed(seed)
    outs = tensors(out)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in outs]
    return torch.stack([(t * w).sum() for t, w in zip(outs, weights, strict=True)]).sum()


def trains(spec: Spec) -> bool:
    """Whether plain torch can run a step of the model, every parameter trained."""
    model = network(spec).requires_grad_(True)
    try:
        torch.autograd.backward(loss(model(batch(spec))))
    except RuntimeError:
        return False
    return True


def widths(spec: Any) -> list[int]:
    """Input channels a group of every conv in a spec."""
    if isinstance(spec, list):
        return [w for s in spec for w in widths(s)]
    if not isinstance(spec, dict):
        return []
    inner = [w for v in spec.values() for w in widths(v)]
    return [spec["in"] // spec["groups"], *inner] if "groups" in spec else inner


@st.composite
def examples(draw: Any) -> tuple[Spec, int, str]:
    """A network, a rank that one of its convs takes where there is one, and a choice of sites."""
    spec: Spec = draw(networks())
    rank = draw(st.integers(1, max(1, min(3, max(widths(spec)) - 1))))
    return spec, rank, draw(st.sampled_from(["auto", "all", "all"]))
