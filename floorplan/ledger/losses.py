"""Losses: torch's own by name or module, how parts of a batch share them out, and the targets that fit them.

named        cross_entropy(ignore_index=255)   a part runs its sum, over what the whole batch counts
stated       reduction="mean" or "sum"         the user says that it adds up over samples
any other    two passes                        it sees the outputs of the whole batch (step/runner.py)
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.kernels import on_fakes
from floorplan.torch_doors import FakeTensor, hooks_of, tensors_in

Loss = Callable[[Any, Any], Tensor]  # (what the model returns, target) -> scalar, or one value a sample


def total_of(out: Any, target: Any, reduction: str = "sum") -> Tensor:
    """The sum of all outputs; the target is not read."""
    return torch.stack([t.sum() for t in tensors_in(out)]).sum()


@dataclass(frozen=True)
class _Kind:
    """A loss of torch: its module, its function, the options that both take, and how its mean is made."""

    module: type[nn.Module] | None
    run: Callable[..., Tensor]
    options: tuple[str, ...] = ()
    classes: bool = False  # targets are class numbers, of which the mean counts some or weighs them
    reductions: tuple[str, ...] = ("mean", "sum", "none")


_KINDS = {
    "cross_entropy": _Kind(nn.CrossEntropyLoss, F.cross_entropy, ("weight", "ignore_index", "label_smoothing"), True),
    "nll": _Kind(nn.NLLLoss, F.nll_loss, ("weight", "ignore_index"), True),
    "mse": _Kind(nn.MSELoss, F.mse_loss),
    "l1": _Kind(nn.L1Loss, F.l1_loss),
    "smooth_l1": _Kind(nn.SmoothL1Loss, F.smooth_l1_loss, ("beta",)),
    "huber": _Kind(nn.HuberLoss, F.huber_loss, ("delta",)),
    "bce_with_logits": _Kind(nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
    "kl_div": _Kind(nn.KLDivLoss, F.kl_div, ("log_target",), False, ("mean", "sum", "none", "batchmean")),
    "sum": _Kind(None, total_of, (), False, ("sum",)),
}
NAMES = tuple(_KINDS)


@dataclass(frozen=True, eq=False)
class Named:
    """A loss of torch with its options, or a module of torch that is asked for them at every call.

    Called with what the model returns and the target, it gives torch's value of the whole batch. A loss by name
    reads the first output, one that came as torch's module or function the only one.
    """

    name: str
    given: Mapping[str, Any] | nn.Module
    first: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What is passed to torch's function, `reduction` apart."""
        if isinstance(self.given, nn.Module):
            return {k: getattr(self.given, k) for k in _KINDS[self.name].options}
        return {k: v for k, v in self.given.items() if k != "reduction"}

    @property
    def reduction(self) -> str:
        """mean, sum, none or batchmean."""
        if isinstance(self.given, nn.Module):
            return str(self.given.reduction)
        return str(self.given.get("reduction", _KINDS[self.name].reductions[0]))

    @property
    def weights(self) -> list[Tensor]:
        """The tensors among its options."""
        return [v for v in self.options.values() if isinstance(v, Tensor)]

    def on(self, weights: Sequence[Tensor]) -> "Named":
        """The same with other tensors in their place: fakes of them."""
        left = iter(weights)
        own = {k: next(left) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return Named(self.name, {**own, "reduction": self.reduction}, self.first)

    @property
    def adds_up(self) -> bool:
        """Whether parts can share it out: not if a weight may be one an element of the whole batch."""
        w = self.options.get("weight")
        return _KINDS[self.name].classes or not isinstance(w, Tensor) or w.numel() == 1

    def __call__(self, out: Any, target: Any) -> Tensor:
        """The loss of a whole batch."""
        return self._run(out, target, self.reduction)

    def _run(self, out: Any, target: Any, reduction: str) -> Tensor:
        run = _KINDS[self.name].run
        if self.name == "sum":
            return run(out, target)
        found = list(tensors_in(out))
        if not found or (len(found) > 1 and not self.first):
            why = f"the model returns {len(found)} tensors; give a loss of your own that takes them apart"
            raise FloorplanError(f"loss {self.name}: {why}")
        return run(found[0], target, reduction=reduction, **self.options)

    def part(self, out: Any, target: Any) -> Tensor:
        """What a part of a batch runs: the sum of its terms where the mean counts them, else its own mean or sum."""
        first = next(tensors_in(out), None)
        if self.name != "sum" and not _KINDS[self.name].classes and first is not None:
            if not isinstance(target, Tensor) or target.shape != first.shape:
                has = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
                why = f"a target {has} for an output {list(first.shape)} is broadcast over samples"
                raise FloorplanError(f"loss {self.name}: {why}; give one of the output's shape")
            w = self.options.get("pos_weight")
            if w is not None and w.dim() == first.dim() and len(w) > 1:
                why = f"pos_weight {list(w.shape)} has a value a sample"
                raise FloorplanError(f"loss {self.name}: {why}; give one a class")
        return self._run(out, target, "sum" if self._counts(target) else self.reduction)

    def _counts(self, target: Any) -> bool:
        """Whether the mean counts its targets: class numbers may be ignored and weighed."""
        classes = _KINDS[self.name].classes and isinstance(target, Tensor) and not target.is_floating_point()
        return classes and self.reduction == "mean"

    def counted(self, target: Any, size: int) -> float | None:
        """What the mean of a whole batch divides by, taken `size` samples at a time; None: by samples alike.

        Fake targets all count.
        """
        if not self._counts(target):
            return None
        return sum((self._count(t) for t in target.split(size)), 0.0)

    def _count(self, target: Tensor) -> float:
        w, valid = self.options.get("weight"), target != self.options.get("ignore_index", -100)
        found = valid.sum() if w is None else (w[torch.where(valid, target, 0)] * valid).sum()
        return float(target.numel() if isinstance(found, FakeTensor) else found)


def loss(name: str, **options: Any) -> Named:
    """A loss of torch by name, with torch's options: `loss("cross_entropy", ignore_index=255, weight=w)`.

    Parts of a batch share it out exactly. FloorplanError for a name or an option that is not known.
    """
    kind = _KINDS[loss_named(name, "loss").name]
    for k, v in options.items():
        known = (*kind.options, "reduction")
        if k not in known:
            raise FloorplanError(f"loss {name}: no option {k}; it takes {', '.join(known)}")
        if k == "reduction" and v not in kind.reductions:
            raise FloorplanError(f"loss {name}: reduction {v}: not known; use {', '.join(kind.reductions)}")
    return Named(name, options)


def as_loss(given: Any) -> Loss:
    """A loss as it was given: a name, torch's own module or function (a partial of it too), or any callable."""
    if isinstance(given, str):
        return loss_named(given, "loss")
    called, options = given, dict[str, Any]()
    if isinstance(given, functools.partial) and not given.args:
        called, options = given.func, {k: v for k, v in given.keywords.items() if v is not None}
    for name, kind in _KINDS.items():
        known = {*kind.options, "reduction"}
        if kind.module is not None and type(given) is kind.module and not hooks_of(given):
            return Named(name, given, False)
        if called is kind.run and options.keys() <= known and options.get("reduction", "mean") in kind.reductions:
            return Named(name, options, False)
    if not callable(given):
        raise FloorplanError(f"loss: a {type(given).__name__} is no loss; give a name or a callable (output, target)")
    return given  # type: ignore[no-any-return]


def weights_of(loss: Loss) -> list[Tensor]:
    """The tensors of a loss of torch, which a run on fakes has beside its inputs."""
    return loss.weights if isinstance(loss, Named) else []


def faked(loss: Loss, weights: Sequence[Tensor]) -> Loss:
    """A loss that fakes go through as real tensors do, with fakes of its weights."""
    return loss.on(weights) if isinstance(loss, Named) else on_fakes(loss)


def trained_in(loss: Loss) -> list[nn.Parameter]:
    """What trains in a loss that is a module of the user's."""
    return list(loss.parameters()) if isinstance(loss, nn.Module) else []


@contextmanager
def ungraded(loss: Loss) -> Iterator[None]:
    """What trains in a loss starts without a gradient, as the model of a run does, and has its own again afterwards."""
    grads = [(p, p.grad) for p in trained_in(loss)]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        for p, g in grads:
            p.grad = g


def spelled(loss: Loss) -> str:
    """A loss in words: torch's name and options, or what Python calls it."""
    if not isinstance(loss, Named):
        return str(getattr(loss, "__name__", type(loss).__name__))
    given = {**loss.options, "reduction": loss.reduction} if loss.given else {}
    known = {k: list(v.shape) if isinstance(v, Tensor) else v for k, v in given.items() if v is not None}
    return loss.name + (f"({', '.join(f'{k}={v}' for k, v in known.items())})" if known else "")


@dataclass(frozen=True)
class Shared:
    """The loss of a batch of `size` samples as its parts have it; count: what its mean divides by, None: samples.

    mean: whether `loss` is a mean over samples (or None: what it is by itself), for what is not a `Named`.
    """

    loss: Loss
    mean: bool | None
    size: int
    count: float | None = None

    @property
    def scaled(self) -> bool:
        """Whether a part's value is multiplied by a factor."""
        return self.loss.reduction != "sum" if isinstance(self.loss, Named) else self.mean is not False

    def whole(self, out: Any, target: Any) -> Tensor:
        """The loss of the whole batch, a scalar."""
        return self._scalar(self.loss(out, target), out)

    def part(self, out: Any, target: Any) -> Tensor:
        """What a part of it runs, a scalar."""
        run = self.loss.part if isinstance(self.loss, Named) else self.loss
        return self._scalar(run(out, target), out)

    def _scalar(self, value: Any, out: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise FloorplanError(f"loss: returns a {type(value).__name__}; return a tensor: one value, or one a sample")
        if value.numel() == 1:
            return value.reshape(()) if value.dim() else value
        rows = next((len(t) for t in tensors_in(out) if t.dim()), 0)
        if value.shape != (rows,):
            raise FloorplanError(f"loss: returns shape {list(value.shape)}; return one value, or one a sample")
        return value.mean() if self.scaled else value.sum()

    def factor(self, n: int) -> float:
        """What the value of a part of n samples is multiplied by."""
        if not self.scaled:
            return 1.0
        if self.count is None:
            return n / self.size
        return 1 / self.count if self.count else float("nan")  # as torch's mean of nothing


def loss_named(name: str, where: str = "--loss") -> Named:
    """The loss of that name; FloorplanError lists them all."""
    if name not in LOSSES:
        raise FloorplanError(f"{where} {name}: not known; use {', '.join(NAMES)}")
    return LOSSES[name]


LOSSES: dict[str, Named] = {name: Named(name, {}) for name in _KINDS}
cross_entropy, mse = LOSSES["cross_entropy"], LOSSES["mse"]


def target_for(gm: nn.Module, inputs: Sequence[Any], loss: str) -> Tensor:
    """A target that fits the model's first output; FloorplanError where the loss does not."""
    return target_like(concrete_fakes(gm, inputs).forward(), inputs, loss)


def target_like(returned: Any, inputs: Sequence[Any], loss: str) -> Tensor:
    """A target that fits what the model returns for these inputs, which may be fakes; FloorplanError likewise."""
    loss_named(loss)
    out = next(tensors_in(returned), None)
    if out is None:
        raise FloorplanError(f"--loss {loss}: the model returns no tensor; return one that the loss can take")
    device = next((t.device for t in tensors_in(tuple(inputs))), torch.device("cpu"))
    if not _KINDS[loss].classes:
        return torch.zeros(out.shape, dtype=out.dtype, device=device)
    if out.dim() < 2 or not out.is_floating_point():
        raise FloorplanError(f"--loss {loss}: the first output has shape {list(out.shape)}; use --loss sum")
    shape = (out.shape[0], *out.shape[2:])
    return torch.zeros(shape, dtype=torch.int64, device=device)
