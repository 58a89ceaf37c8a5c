"""compile_step: a training step without autograd for an adapted model, by a schedule.

    step = floorplan.compile_step(model, loss, plan=Schedule(micro_batch=16))
    loss = step(x, y)            .grad is filled; any torch optimizer follows

The gradients are those of the whole batch, whatever the schedule.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.files import write_text
from floorplan.graph.edit import module_calls
from floorplan.layers.adapter import adapters
from floorplan.layers.bits import as_layout
from floorplan.layers.fused import FusedConv
from floorplan.layers.layer import model_state
from floorplan.layers.promises import Forgetful, Keep, Promise
from floorplan.ledger.inputs import arguments, make_inputs, of_one
from floorplan.ledger.losses import Loss, Named, as_loss
from floorplan.ledger.recorder import op_name
from floorplan.step.guard import Compiled, ready, refuse_unsplit, trainable_names
from floorplan.step.program import Builder
from floorplan.step.samples import refuse_coupled
from floorplan.step.schedule import Schedule, options_in, read_plan, schedule_in
from floorplan.step.source import source_of
from floorplan.step.studied import Studied, studied
from floorplan.torch_doors import show_source, tensors_in

LAYOUTS = ("auto", "contiguous", "channels_last")


@dataclass(repr=False)
class Step(Compiled):
    """A compiled training step. `step(*inputs, target)` fills .grad and returns the loss.

    source: the Python that runs. fallback: nodes that run under autograd, and why.
    """

    layout: int  # 1: channels_last
    run: Callable[[Sequence[Any], Any], Tensor] = field(init=False, repr=False)
    tried: bool = field(default=False, init=False)  # whether a loss that is said to add up was seen to

    def __call__(self, *inputs: Any) -> Tensor:
        """inputs: the model's arguments, then the target. Gradients are added to .grad."""
        ready(self, inputs)
        if not self.tried:
            refuse_unsplit(self, inputs[:-1], inputs[-1])
            self.tried = True
        untouched = [p for p in self.module.parameters() if p.grad is None]
        try:
            return self.run(inputs[:-1], inputs[-1])
        except (FloorplanError, RuntimeError, ValueError, TypeError, IndexError) as e:
            for p in untouched:  # what a part has added so far is no gradient of the batch
                p.grad = None
            if isinstance(e, FloorplanError):
                raise
            raise FloorplanError(f"step: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e

    def __repr__(self) -> str:
        return f"Step({type(self.module).__name__}, {self.schedule}, {len(self.fallback)} nodes under autograd)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Step":
        """A step of a copy of the module."""
        twin = replace(self, module=copy.deepcopy(self.module, memo))
        twin.run = twin.bound(twin.module)
        return twin

    def __reduce__(self) -> Any:
        raise FloorplanError("step: is not written to a file; save the model and compile it again, or step.save(path)")

    @property
    def source(self) -> str:
        """The Python that runs."""
        return self._source(False)

    def _source(self, marked: bool) -> str:
        return source_of(self.program, type(self.module).__name__, self.schedule, self.layout, marked)

    def bound(
        self, model: nn.Module, at: Callable[[str, str], None] | None = None, loss: Loss | None = None
    ) -> Callable[[Sequence[Any], Any], Tensor]:
        """The step on a model's modules, its own or their fakes; `at` is told every node and direction."""
        source = self._source(at is not None)
        name = f"<floorplan step {hashlib.sha1(source.encode()).hexdigest()[:12]}>"
        show_source(name, source)
        space: dict[str, Any] = {"at": at}
        exec(compile(source, name, "exec"), space)
        return space["make_step"](model, loss or self.loss, self.mean, at)  # type: ignore[no-any-return]

    @property
    def fallback(self) -> dict[str, str]:
        """Nodes without a straight-line rule, which run under autograd."""
        nodes = [n for r in self.program.regions for n in r.nodes]
        return {n.name: f"{op_name(n, self.program.gm)} has no straight-line rule" for n in nodes}

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the generated source."""
        write_text(path, self.source, force=force)


def compile_step(
    model: fx.GraphModule,
    loss: str | Loss,
    inputs: Any = None,
    *,
    plan: Schedule | Mapping[str, Any] | str | Path | None = None,
    reduction: str | None = None,
) -> Step:
    """A step of `model` (of `rewrite` or `load`) by `plan`, as straight-line code without autograd.

    loss: a name (`floorplan.loss` gives it options), a loss module or function of torch, or any callable (output,
    target) -> one value, or one a sample, which are averaged. A schedule with parts gives a callable the outputs of
    the whole batch, in two passes, unless `reduction` says that it adds up: "mean" or "sum" over samples.
    plan: a Schedule, a plan.json (its path or document), or by default the schedule that the model was rewritten
    with. inputs: example arguments; by default those recorded when the model was adapted.
    channels_last lays the model's conv weights out anew, values unchanged.
    """
    if not isinstance(model, fx.GraphModule):
        raise FloorplanError(f"compile_step: {type(model).__name__} is no adapted graph; give rewrite(...).module")
    run = as_loss(loss)
    if reduction not in (None, "mean", "sum"):
        raise FloorplanError(f"reduction {reduction}: not known; use mean or sum")
    if isinstance(run, Named) and reduction not in (None, run.reduction):
        own = f"has its own, {run.reduction}; say it there, as in floorplan.loss({run.name!r}, reduction={reduction!r})"
        raise FloorplanError(f"reduction {reduction}: loss {run.name} {own}")
    schedule = plan if isinstance(plan, Schedule) else _schedule_of(plan, model)
    args = example_inputs(model) if inputs is None else arguments(inputs)
    if not any(t.dim() for t in tensors_in(args)):
        raise FloorplanError("compile_step: no input is a tensor; give example inputs, batch first")
    if schedule.parts:
        refuse_coupled(model, args)
    return compiled(studied(model, args), run, schedule, None if reduction is None else reduction == "mean")


def compiled(s: Studied, loss: str | Loss, schedule: Schedule, mean: bool | None = None) -> Step:
    """The step of a graph that was looked at before, by a schedule that its samples allow."""
    model = s.gm
    again = next((n for n, m in model.named_modules() if isinstance(m, Keep | Promise | Forgetful)), None)
    if again is not None:
        why = "computes again what it let go, which autograd alone runs"
        raise FloorplanError(f"compile_step: {again} {why}; compile the model as it was before remat")
    program = Builder(s, schedule).build()
    layout = layout_for(s.values, schedule.layout, model)
    for t in model_state(model):  # a kernel would lay a conv's weight out anew on every call
        if t.dim() == 4 and t.is_floating_point():
            t.data = as_layout(t.data, layout)
    step = Step(model, schedule, program, as_loss(loss), mean, trainable_names(model), layout)
    step.run = step.bound(model)
    return step


def _schedule_of(plan: Mapping[str, Any] | str | Path | None, model: fx.GraphModule) -> Schedule:
    if plan is None:
        return Schedule.of(model.meta.get("floorplan", {}).get("schedule", {}))
    if not isinstance(plan, str | Path | Mapping):
        raise FloorplanError(f"compile_step: a {type(plan).__name__} is no plan; give a Schedule or a plan.json")
    if isinstance(plan, Mapping) and "schema" not in plan:
        return Schedule.of(plan)
    document = read_plan(plan)
    planned, asked = options_in(document)["rank"], model.meta.get("floorplan", {}).get("rank")
    has = {m.rank for _, m in adapters(model)} if asked is None else {asked}  # a layer may have less than was asked for
    if has and has != {planned}:
        raise FloorplanError(f"compile_step: the plan is for rank {planned}, the model has rank {max(has)}; plan again")
    return Schedule.of(schedule_in(document))


def example_inputs(model: fx.GraphModule) -> tuple[Any, ...]:
    """Inputs of the sizes recorded when the model was adapted, batch 2."""
    recorded = model.meta.get("floorplan", {}).get("input")
    if not recorded:
        raise FloorplanError("compile_step: no input size is recorded with the model; give inputs=")
    return make_inputs(model, of_one(recorded), 2)


def layout_for(values: Mapping[str, Any], asked: str, model: fx.GraphModule) -> int:
    """1 for channels_last: where it is asked for, or by itself for 2-D float32 and 16-bit maps."""
    if asked not in LAYOUTS:
        raise FloorplanError(f"layout {asked}: not known; use {', '.join(LAYOUTS)}")
    sites = [n.name for n, _ in module_calls(model, FusedConv)]
    maps = [t for n in sites or values for t in tensors_in(values.get(n)) if t.is_floating_point() and t.dim() > 2]
    flat = bool(maps) and all(t.dim() == 4 for t in maps)
    if asked == "channels_last" and not any(t.dim() == 4 for t in maps):
        raise FloorplanError("layout channels_last: the model has no (B, C, H, W) map; use contiguous")
    return int(asked == "channels_last" or (asked == "auto" and flat and maps[0].dtype != torch.float64))


__all__: Sequence[str] = ("Schedule", "Step", "compile_step")
