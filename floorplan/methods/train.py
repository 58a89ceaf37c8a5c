"""`floorplan.adapt`: the adaptation loop of the MemFLoRA paper, for any method and any classifier.

source -> (AdaBN calibration) -> the method's passes -> `steps` steps of Adam -> the best or last adapter
"""

import copy
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, describe
from floorplan.files import ensure_writable, whole
from floorplan.layers.adapter import adapter_rank
from floorplan.layers.replay import Replay
from floorplan.ledger.inputs import arguments
from floorplan.ledger.losses import LOSSES
from floorplan.methods.calibrate import calibrate as adabn
from floorplan.methods.catalogue import Options, Plan, method, recorded
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Subject
from floorplan.torch_doors import NormBase

Batch = tuple[Any, Any]  # (the forward's input or inputs, target)


@dataclass
class AdaptLog:
    """What happened: one loss a step, one validation value where it was taken, and the step kept."""

    method: str
    losses: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    kept: int = 0  # steps taken when the returned adapter was as it is


@dataclass(frozen=True)
class Adapted:
    """The adapted module, in eval mode, and its log."""

    module: fx.GraphModule
    log: AdaptLog


@dataclass(frozen=True)
class Recipe:
    """How to train; the defaults are the paper's (section 4.1)."""

    steps: int = 50
    lr: float = 1e-3
    weight_decay: float = 5e-4
    projection_lr: float = 1e-2  # MemFLoRA-SG's optimizer of P, without weight decay
    chunks: int = 1  # parts of the batch in MemFLoRA-SG's replay


def adapt(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    method: str = "memflora",
    rank: int = 2,
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    steps: int = 50,
    lr: float = 1e-3,
    weight_decay: float = 5e-4,
    projection_lr: float = 1e-2,
    chunks: int = 1,
    loss: str | Callable[[Any, Any], Tensor] = "cross_entropy",
    validate: Callable[[nn.Module], float] | None = None,
    every: int = 1,
    calibrate: str | None = None,
    checkpoint: str | Path | None = None,
    verified: bool = True,
    progress: bool = True,
) -> Adapted:
    """Adapt `model` to the (input, target) batches; the model itself is not changed.

    batches: gone through again and again, in their own order. loss: a name of step.LOSSES, or
    loss(output, target) -> scalar. validate(module) -> a value, smaller is better, taken every
    `every` steps: the best adapter is returned; without it the last. calibrate: "ema" (the paper's
    AdaBN, on the first batch) or "reset". checkpoint: a file to go on from after an interruption.
    FloorplanError if the loss is no longer a number: nothing of that step is kept.
    """
    recipe = Recipe(steps, lr, weight_decay, projection_lr, chunks)
    if steps < 0 or every < 1 or chunks < 1 or min(lr, weight_decay, projection_lr) < 0:
        raise FloorplanError("adapt: steps and rates are not negative, every and chunks are 1 or more")
    if checkpoint is not None:
        ensure_writable(checkpoint, force=True)
    run = LOSSES.get(loss) if isinstance(loss, str) else loss
    if run is None:
        raise FloorplanError(f"loss {loss}: not known; use {', '.join(LOSSES)}, or a function")
    first, stream = _peek(batches)
    plan = Plan(method, Options(rank, sites, seed, train_head))
    module = _prepared(model, arguments(first[0]), plan, calibrate, verified)
    return _Loop(module, recipe, run, checkpoint).run(stream, validate, every, progress)


def _peek(batches: Iterable[Batch]) -> tuple[Batch, Iterator[Batch]]:
    """The first batch, and all of them over and over; what a one-shot iterator gave is kept."""
    try:
        stream = _again(batches)
        first = next(stream, None)
    except TypeError as e:
        raise FloorplanError("adapt: batches cannot be gone through; give pairs (input, target)") from e
    if first is None:
        raise FloorplanError("adapt: no batch was given")
    return first, itertools.chain([first], stream)


def _again(batches: Iterable[Batch]) -> Iterator[Batch]:
    once = isinstance(batches, Iterator)
    seen: list[Batch] = []
    while True:
        count = 0
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise FloorplanError("adapt: each batch must be a pair (input, target)")
            count += 1
            pair = (batch[0], batch[1])
            if once:
                seen.append(pair)
            yield pair
        if once:
            batches, once = seen, False
        elif not count:
            return


def _prepared(
    model: nn.Module, inputs: tuple[Any, ...], plan: Plan, calibrate: str | None, verified: bool
) -> fx.GraphModule:
    if isinstance(model, fx.GraphModule) and adapter_rank(model) is not None:
        has = model.meta.get("floorplan", {}).get("method", plan.method)
        if calibrate or plan.method not in (has, "memflora"):
            way = "it goes on as it is, without method or calibrate"
            raise FloorplanError(f"adapt: the model is adapted by {has} already; {way}")
        return copy.deepcopy(model)
    source = adabn(model, [inputs], calibrate) if calibrate else model
    subject = Subject(source, type(model).__name__, inputs, ())
    module = adapted(subject, plan, verified=verified)[0].gm
    module.meta["floorplan"] = recorded(plan, inputs)
    return module


class _Loop:
    """The state of one adaptation."""

    def __init__(
        self, module: fx.GraphModule, recipe: Recipe, loss: Callable[[Any, Any], Tensor], checkpoint: str | Path | None
    ) -> None:
        self.module, self.recipe, self.loss = module, recipe, loss
        self.path = None if checkpoint is None else Path(checkpoint)
        self.plan: dict[str, Any] = module.meta.get("floorplan", {})
        self.log = AdaptLog(self.plan.get("method", "memflora"))
        self.trained = [p for p in module.parameters() if p.requires_grad]
        adam, decay = torch.optim.Adam, recipe.weight_decay
        self.optimizers = [adam(self.trained, lr=recipe.lr, weight_decay=decay)] if self.trained else []
        self.replay = Replay(module) if method(self.log.method).replays else None
        if self.replay is not None:
            self.optimizers.append(adam(self.replay.projections(), lr=recipe.projection_lr))
        self.best: dict[str, Tensor] | None = None
        # Another source, seed or rate is another adaptation: a checkpoint must not be taken for it.
        rates = {k: v for k, v in vars(recipe).items() if k != "steps"}
        state = [t.detach().cpu().contiguous() for t in (*module.parameters(), *module.buffers())]
        start = functools.reduce(lambda c, t: zlib.crc32(t.view(-1).view(torch.uint8).numpy().tobytes(), c), state, 0)
        self.identity = {"plan": self.plan, "rates": rates, "start": start}

    def run(
        self, stream: Iterator[Batch], validate: Callable[[nn.Module], float] | None, every: int, progress: bool
    ) -> Adapted:
        """All steps that are left, then the best adapter or the last."""
        self._resume()
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
            task = bar.add_task(f"adapting by {self.log.method}", total=self.recipe.steps)
            steps = self.recipe.steps if self.optimizers else 0
            for done, (x, y) in enumerate(itertools.islice(stream, steps)):
                if done >= len(self.log.losses):
                    self._step(arguments(x), y)
                    if validate is not None and (len(self.log.losses) % every == 0 or done == steps - 1):
                        self._validate(validate)
                    self._save()
                bar.advance(task)
        if self.best is None:
            self.log.kept = len(self.log.losses)
        else:
            self.module.load_state_dict(self.best, strict=False)
        return Adapted(self.module.eval(), self.log)

    def _step(self, inputs: tuple[Any, ...], target: Any) -> None:
        self.module.train()
        for o in self.optimizers:
            o.zero_grad(set_to_none=True)
        with self.replay.watching() if self.replay else nullcontext():
            value = self._backward(inputs, target)
        if self.replay is not None:
            self.replay(*inputs, chunks=self.recipe.chunks)
        for o in self.optimizers:
            o.step()
        self.log.losses.append(value)

    def _backward(self, inputs: tuple[Any, ...], target: Any) -> float:
        value, step = self.loss(self.module(*inputs), target), len(self.log.losses) + 1
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise FloorplanError("adapt: the loss must be one number that depends on what trains")
        if not torch.isfinite(value):
            way = "lower lr, or look for NaN in the batch"
            raise FloorplanError(f"adapt: the loss is {value.item()} at step {step}; {way}")
        value.backward()  # type: ignore[no-untyped-call]
        if not all(bool(torch.isfinite(p.grad).all()) for p in self.trained if p.grad is not None):
            way = "look for a root or a division at zero in the loss"
            raise FloorplanError(f"adapt: a gradient is not finite at step {step} although the loss is; {way}")
        return float(value.detach())

    def _validate(self, validate: Callable[[nn.Module], float]) -> None:
        with torch.no_grad():
            value = float(validate(self.module.eval()))
        step = len(self.log.losses)
        known = [v for v in self.log.validation.values() if not math.isnan(v)]
        if not math.isnan(value) and (not known or value < min(known)):
            self.best, self.log.kept = self._small_state(), step
        self.log.validation[step] = value

    def _small_state(self) -> dict[str, Tensor]:
        """The adapter alone: what trains, P where it is replayed, statistics that move."""
        moving = {p for p, m in self.module.named_modules() if isinstance(m, NormBase)}
        projections = {id(p) for p in self.replay.projections()} if self.replay else set()
        kept: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        buffers = self.module.named_buffers()
        kept |= {n: b for n, b in buffers if id(b) in projections or n.rpartition(".")[0] in moving}
        return {n: t.detach().clone() for n, t in kept.items()}

    def _save(self) -> None:
        if self.path is None:
            return
        document: dict[str, Any] = {"format": "floorplan.adapting/1", "identity": self.identity, "log": vars(self.log)}
        document |= {"state": self._small_state(), "best": self.best, "random": torch.get_rng_state()}
        document["optimizers"] = [o.state_dict() for o in self.optimizers]
        with whole(self.path) as draft:
            torch.save(document, draft)

    def _resume(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            document = torch.load(self.path, weights_only=True)
            if document["format"] != "floorplan.adapting/1" or document["identity"] != self.identity:
                raise ValueError("another model, method, seed or rate")
            self.module.load_state_dict(document["state"], strict=False)
            for o, state in zip(self.optimizers, document["optimizers"], strict=True):
                o.load_state_dict(state)
            self.log, self.best = AdaptLog(**document["log"]), document["best"]
            torch.set_rng_state(document["random"])
        except Exception as e:
            why = f"not a checkpoint of this adaptation ({describe(e, 120)})"
            raise FloorplanError(f"{self.path}: {why}; delete it to start again") from e
