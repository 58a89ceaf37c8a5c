"""Few random samples through a model together and alone: where no rule knows whether samples touch, their gradients do.

On a copy in float64, in the model's present mode, with every parameter that is constant (a U that starts at zero,
a gate, a small scale) at random values, so that no branch is closed. Random draws give constants.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.graph.untouched import no_memory
from floorplan.ledger.differ import relative_error
from floorplan.torch_doors import TorchDispatchMode, map_tensors, schema_of, tensors_in

N = 3  # samples
TOLERANCE = {torch.float64: 1e-7}  # of a tensor's largest entry; others 1e-3


def refuse_unlike(model: nn.Module, inputs: Sequence[Any], rows: Sequence[bool], unknown: Mapping[str, str]) -> None:
    """FloorplanError if outputs or gradients of samples depend on the others of their batch.

    rows: of each input tensor, whether it has the samples in front. unknown: node -> what no rule knew, for the words.
    """
    where, why = next(iter(unknown.items()))
    known = f"{where}: {why}, and " if where else f"{why}, and "
    devices = list({t.device.index for t in tensors_in(tuple(inputs)) if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), no_memory(model):
        torch.manual_seed(0)
        for dtype in (torch.float64, None):
            twin, given = _ready(model, inputs, rows, dtype)
            try:
                whole = _run(twin, given, rows, slice(0, N))
                alone = [_run(twin, given, rows, slice(i, i + 1)) for i in range(N)]
            except Exception as e:  # whatever a model raises; in its own precision it may not
                if dtype is None:
                    reason = f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
                    reason = str(e) if isinstance(e, FloorplanError) else f"{N} random samples give {reason}"
                    raise FloorplanError(f"schedule: {known}{reason}; use the whole batch") from e
                continue
            if wrong := _unlike(whole, alone, TOLERANCE.get(dtype or torch.float32, 1e-3)):
                raise FloorplanError(f"schedule: {known}{wrong}, which parts would change; use the whole batch")
            return


def _ready(model: nn.Module, inputs: Sequence[Any], rows: Sequence[bool], dtype: torch.dtype | None) -> tuple[Any, Any]:
    """A copy with its constants random, and random samples."""
    twin, left = copy.deepcopy(model), iter(rows)
    twin = twin.to(dtype) if dtype is not None else twin
    with torch.no_grad():
        for p in twin.parameters():
            if p.numel() and p.is_floating_point() and bool((p == p.flatten()[0]).all()):
                p.uniform_(0.2, 1.0)

    def drawn(t: Tensor) -> Tensor:
        shape = (N, *t.shape[1:]) if next(left) else tuple(t.shape)
        if t.is_floating_point():
            return torch.randn(shape, dtype=dtype or t.dtype, device=t.device)
        if t.dtype == torch.bool:
            return torch.rand(shape, device=t.device) > 0.5
        return torch.randint(0, int(t.max()) + 1 if t.numel() else 1, shape, dtype=t.dtype, device=t.device)

    return twin, map_tensors(drawn, tuple(inputs))


Outcome = tuple[list[Tensor], list[Tensor], list[Tensor]]  # outputs, gradients of inputs, gradients of parameters


def _run(twin: nn.Module, given: Any, rows: Sequence[bool], part: slice) -> Outcome:
    """One forward and backward of some of the samples, of a loss that weighs every output."""
    left, leaves = iter(rows), list[Tensor]()

    def cut(t: Tensor) -> Tensor:
        t = t[part].clone() if next(left) else t
        if t.is_floating_point() and t.dim():
            leaves.append(t.requires_grad_())
        return t

    state = {k: v.clone() for k, v in twin.state_dict().items()}
    trained = [p for p in twin.parameters() if p.requires_grad]
    with torch.enable_grad():
        with _Constant():  # type: ignore[no-untyped-call]
            out = list(tensors_in(twin(*map_tensors(cut, given))))
        loss = sum(((t * _weights(t, part)).sum() for t in out if t.is_floating_point()), torch.zeros(()))
        grads = torch.autograd.grad(loss, [*leaves, *trained], allow_unused=True)
    for k, v in twin.state_dict().items():
        if not torch.equal(v, state[k]):
            raise FloorplanError(f"the forward writes to {k}, which every part would do")
    found = [torch.zeros_like(p) if g is None else g for p, g in zip([*leaves, *trained], grads, strict=True)]
    return [t.detach() for t in out], found[: len(leaves)], found[len(leaves) :]


def _weights(t: Tensor, part: slice) -> Tensor:
    """Random numbers of a sample's place in the batch and of its outputs'."""
    if t.shape[:1] != (part.stop - part.start,):
        raise FloorplanError(f"the model's output {list(t.shape)} does not have the samples in front")
    g = torch.Generator().manual_seed(t.dim())
    return torch.randn((N, *t.shape[1:]), generator=g, dtype=torch.float64)[part].to(t)


def _unlike(whole: Outcome, alone: Sequence[Outcome], tolerance: float) -> str:
    outs, inputs, params = whole
    pairs = [(f"output {k}", t, torch.cat([a[0][k] for a in alone])) for k, t in enumerate(outs)]
    pairs += [(f"the gradient by input {k}", t, _rows(t, [a[1][k] for a in alone])) for k, t in enumerate(inputs)]
    pairs += [(f"gradient {k}", t, sum((a[2][k] for a in alone), torch.zeros_like(t))) for k, t in enumerate(params)]
    if not all(bool(torch.isfinite(t).all()) for _, a, b in pairs for t in (a, b) if t.is_floating_point()):
        return "gives values that are not finite for random samples"
    top = max((float(t.abs().max()) for t in (*inputs, *params) if t.numel()), default=0.0)
    for what, a, b in pairs:
        floor = 0.0 if what.startswith("output") else 1e-6 * top
        if relative_error(a.to(b.dtype), b, floor) > tolerance:
            return f"{what.rstrip('0123456789 ')} of a sample depends on the other samples of its batch"
    return ""


def _rows(whole: Tensor, alone: Sequence[Tensor]) -> Tensor:
    """Of an input with samples in front, one's after another; of any other, their sum."""
    return torch.cat(list(alone)) if whole.shape != alone[0].shape else torch.stack(list(alone)).sum(0)


class _Constant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout drops nothing and random numbers are all alike."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema_of(func).name.removeprefix("aten::")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if name.startswith("bernoulli"):
            return out.fill_(1)
        return out.fill_(0.5) if name in _DRAWN else out


_DRAWN = set("rand randn rand_like randn_like uniform_ normal_ exponential_ log_normal_ cauchy_".split())
