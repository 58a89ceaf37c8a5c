"""MemFLoRA-SG: the gradient of the frozen projections P from a second forward (MemFLoRA eq. 12).

1  forward, loss.backward():  each site keeps dL/dq, r channels
2  replay: the same batch again under no_grad, parameters unchanged, the same random state;
   P.grad += <dL/dq, x> as each site is entered, x released at once
3  both optimizers step: one for U, one for P

replay = Replay(model); optimizer_p = torch.optim.Adam(replay.projections(), lr=1e-2)
with replay.watching():
    loss_of(model(x), y).backward()
replay(x)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapters
from floorplan.layers.lowrank import project_grad
from floorplan.torch_doors import BatchNormNd, NormBase, tensors_in


def replayed(model: nn.Module) -> list[Any]:
    """Every adapter whose P a replay trains."""
    return [m for _, m in adapters(model) if m.replays]


@contextmanager
def capturing(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Let every adapted site keep dL/dq in its backward."""
    sites = replayed(model)
    for m in sites:
        m.captures, m.gq = on, None
    try:
        yield
    finally:
        for m in sites:
            m.captures = False


class Replay:
    """Fills P.grad of every adapted site after a backward; P stays a buffer throughout."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sites = model, replayed(model)
        if not self.sites:
            raise FloorplanError("memflora-sg: the model has no MemFLoRA site; rewrite it first")
        self._random: list[Tensor] = []  # of the CPU, then of each device
        self._drew = False  # the step took random numbers

    def projections(self) -> list[Tensor]:
        """Every P once, for an optimizer of its own."""
        return list({id(m.P): m.P for m in self.sites}.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the step's forward and backward in here: the random state is noted, dL/dq kept."""
        self._random = _random_state()
        with capturing(self.model):
            yield
        self._drew = not all(torch.equal(a, b) for a, b in zip(_random_state(), self._random, strict=True))

    def __call__(self, *inputs: Any, chunks: int = 1) -> None:
        """Replay the step's forward on the same inputs, in `chunks` parts of the batch."""
        why = _couples(self.model) or ("a step that draws random numbers" if self._drew else "")
        if chunks > 1 and why:
            raise FloorplanError(f"memflora-sg: {why} cannot be replayed in chunks; use chunks=1")
        with torch.no_grad(), _same_statistics(self.model):
            if self._random:
                torch.set_rng_state(self._random[0])
            if self._random[1:]:
                torch.cuda.set_rng_state_all(self._random[1:])
            size = next(t.shape[0] for t in tensors_in(inputs))
            step = -(-size // chunks)
            for start in range(0, size, step):
                self._part(inputs, start, min(size, start + step), size)
        for m in self.sites:
            m.gq = None

    def _part(self, inputs: tuple[Any, ...], start: int, stop: int, size: int) -> None:
        def enter(m: Any, args: tuple[Any, ...]) -> None:
            if m.gq is None:  # no gradient reached this site
                return
            gp = project_grad(args[0], m.gq[start:stop], m.P, m.geo)
            m.P.grad = gp if m.P.grad is None else m.P.grad.add_(gp)
            if stop == size:
                m.gq = None

        whole = start == 0 and stop == size
        part = inputs if whole else tuple(t[start:stop] if isinstance(t, Tensor) else t for t in inputs)
        handles = [m.register_forward_pre_hook(enter) for m in self.sites]
        try:
            self.model(*part)
        finally:
            for h in handles:
                h.remove()


@contextmanager
def _same_statistics(model: nn.Module) -> Iterator[None]:
    """Running statistics and the random state as they were, after a second forward in train mode."""
    norms = [m for m in model.modules() if isinstance(m, NormBase) and m.training]
    buffers = [(b, b.clone()) for m in norms for b in m.buffers()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    for b, old in buffers:
        b.copy_(old)


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _couples(model: nn.Module) -> str:
    """The layer that draws numbers or mixes samples; "" if there is none."""
    for name, m in model.named_modules():
        draws = "dropout" in type(m).__name__.lower() and bool(vars(m).get("p", True))
        batch = isinstance(m, BatchNormNd)
        if (m.training and (draws or batch)) or (batch and m.running_mean is None):
            return f"{name} ({type(m).__name__})"
    return ""
