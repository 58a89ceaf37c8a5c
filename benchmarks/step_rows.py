"""The rows of the step benchmark: a training step each, under autograd or compiled, made the same way everywhere.

full         every parameter trains
autograd     the adapted graph, which is what the compiled rows run
checkpoint   full fine-tuning, segments recomputed by torch.utils.checkpoint
budget       full fine-tuning, recomputed as torch.compile's partitioner sees fit, on torch's own kernels
inductor     the same, on generated kernels; needs a C++ compiler
compiled     floorplan.compile_step by a schedule
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from paired import step
from step_nets import NETS, RANK, Net, randomise_norms
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from floorplan.layers.fused import FusedConv
from floorplan.ledger.storage import StorageTracker
from floorplan.methods.catalogue import Options, Plan
from floorplan.methods.rewrite import adapted
from floorplan.methods.subject import Source, subject_of
from floorplan.methods.verify import randomize_adapters
from floorplan.step.compile import Schedule, Step, compile_step
from floorplan.step.ops import PARTS, is_matrix
from floorplan.step.studied import values_of
from floorplan.store.load import load_model

BACKENDS = {"budget": "aot_eager", "inductor": "inductor"}


@dataclass(frozen=True)
class Row:
    """One training step. amount: segments (0: every block) of a checkpoint row, or the budget of a compiler's row.

    branched: sites that run as two branches: "small:16", where that takes less memory in parts of 16 samples,
    or prefixes of nodes.
    """

    name: str
    kind: str
    layout: str = "channels_last"
    amount: float = 0.0
    schedule: Schedule = Schedule()
    branched: str = ""

    @property
    def made(self) -> dict[str, Any]:
        """What the row is, as plain data: figures of another definition are not its own."""
        s = self.schedule
        return {
            "kind": self.kind,
            "layout": self.layout,
            "amount": self.amount,
            "branched": self.branched,
            "micro_batch": s.micro_batch,
            "stages": [list(p) for p in s.stages],
            "last": s.last,
            "stream": s.stream,
        }


@dataclass(frozen=True)
class Made:
    """A row ready to run: `run` is one step, `step` the compiled one if it is."""

    model: nn.Module
    x: Tensor
    y: Tensor
    run: Callable[[], object]
    step: Step | None = None


def make(net: Net, row: Row) -> Made:
    """The row's step on the net's batch, in its layout."""
    x, y = net.samples(net.batch)
    if row.kind == "compiled":
        gm = adapted_graph(net)
        plan = schedule_of(row, gm, x)
        compiled = compile_step(gm, "cross_entropy", x, plan=plan)
        x = laid_out(x, row.layout)

        def run() -> None:
            gm.zero_grad(set_to_none=True)
            compiled(x, y)

        return Made(gm, x, y, run, compiled)
    model: nn.Module = adapted_graph(net) if row.kind == "autograd" else source(net).train()
    x = laid_out(x, row.layout)
    if row.layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if row.kind == "checkpoint":
        return Made(model, x, y, step(Segments(net.parts(model), int(row.amount)), x, y))
    if row.kind in BACKENDS:
        return Made(model, x, y, _budgeted(model, x, y, row))
    return Made(model, x, y, step(model, x, y))


def source(net: Net) -> nn.Module:
    """The net with random BatchNorm statistics and affine."""
    return randomise_norms(load_model(net.factory).module)


def adapted_graph(net: Net, dtype: torch.dtype = torch.float32, draws: bool = True) -> fx.GraphModule:
    """The net under MemFLoRA with random U; `draws` keeps its dropout, which no two runs share."""
    x, _ = net.samples(2)
    model = source(net).to(dtype)
    for m in model.modules():
        if isinstance(m, nn.Dropout) and not draws:
            m.p = 0.0
    s = subject_of(Source(model, x.to(dtype)))
    gm = adapted(s, Plan("memflora", Options(RANK, net.sites)), verified=False)[0].gm
    randomize_adapters(gm)
    return gm


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A batch of images in a layout; others have only one."""
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" and x.dim() == 4 else x


def schedule_of(row: Row, gm: fx.GraphModule, x: Tensor) -> Schedule:
    """The row's schedule with its layout and the sites that run as two branches."""
    way, _, size = row.branched.partition(":")
    names: tuple[str, ...] = ()
    if way == "small":
        names = _smaller(gm, values_of(gm, (x,)), int(size))
    elif way:
        calls = [n for n in gm.graph.nodes if n.op == "call_module" and n.name.startswith(tuple(way.split(",")))]
        names = tuple(n.name for n in calls if isinstance(gm.get_submodule(n.target), FusedConv))
    return replace(row.schedule, layout=row.layout, branches=names)


def _smaller(gm: fx.GraphModule, values: dict[str, Any], samples: int) -> tuple[str, ...]:
    """Sites whose merged weight is larger than the temporary of their branch: none for 1x1 convs, else a part of z."""
    out = []
    for n in gm.graph.nodes:
        m = gm.get_submodule(str(n.target)) if n.op == "call_module" else None
        if isinstance(m, FusedConv) and m.rank:
            spare = 0 if is_matrix(m) else samples * values[n.name][0].numel() / min(PARTS, samples)
            out += [n.name] if m.weight.numel() > spare else []
    return tuple(out)


class Segments(nn.Module):
    """Parts in so many segments of equal length (0: one a part), each recomputed in the backward."""

    def __init__(self, parts: list[nn.Module], segments: int) -> None:
        super().__init__()
        *blocks, self.head = parts
        size = math.ceil(len(blocks) / segments) if segments else 1
        self.segments = nn.ModuleList(nn.Sequential(*blocks[i : i + size]) for i in range(0, len(blocks), size))

    def forward(self, x: Tensor) -> Tensor:
        """What the model gives."""
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


def _budgeted(model: nn.Module, x: Tensor, y: Tensor, row: Row) -> Callable[[], object]:
    """A step of torch.compile's model; forward and backward are compiled here, under the budget."""
    import torch._dynamo
    import torch._functorch.config as config

    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=BACKENDS[row.kind])
    run = step(compiled, x, y)
    with config.patch(activation_memory_budget=row.amount):
        run()
    return run


@contextmanager
def visible_graphs() -> Iterator[None]:
    """torch.compile steps aside under a dispatch mode that does not say it may look inside."""
    with patch.object(StorageTracker, "ignore_compile_internals", classmethod(lambda cls: True)):
        yield


def fresh(net: str, row: str) -> Callable[[], object]:
    """A row's step for floorplan.budget.resident, which calls this in a fresh process."""
    made = make(NETS[net], rows_of(net)[row])

    def run() -> None:
        made.run()
        made.model.zero_grad(set_to_none=True)

    return run


_BUDGET = {"budget": "activation_memory_budget", "inductor": "Inductor, activation_memory_budget"}


def _references(blocks: int) -> list[Row]:
    segments = round(math.sqrt(blocks))
    budgets = [(0.5, "budget"), (0.2, "budget"), (0.1, "budget"), (0, "budget"), (0.2, "inductor")]
    return [
        Row("full fine-tuning, channels_last", "full"),
        Row("full fine-tuning, contiguous", "full", "contiguous"),
        Row(f"full fine-tuning, checkpoint, {segments} segments", "checkpoint", amount=segments),
        Row("full fine-tuning, checkpoint, every block", "checkpoint"),
        *(Row(f"full fine-tuning, {_BUDGET[kind]} {b:g}", kind, amount=b) for b, kind in budgets),
        Row("autograd, channels_last", "autograd"),
        Row("autograd, contiguous", "autograd", "contiguous"),
    ]


def _cut(*stages: tuple[str, int], last: int = 0, micro: int = 0) -> Schedule:
    return Schedule(micro_batch=micro, stages=stages, last=last)


def _compiled(name: str, schedule: Schedule, branched: str = "", layout: str = "channels_last") -> Row:
    return Row(f"compiled, {name}", "compiled", layout, 0, schedule, branched)


_EARLY, _DOWN = "features_3_conv_2", "layer3_0_downsample_0"
_COMPILED = {
    "mobilenet_v2": [
        _compiled("whole batch", Schedule()),
        _compiled("whole batch, contiguous", Schedule(), layout="contiguous"),
        _compiled("m=16", Schedule(micro_batch=16)),
        _compiled("m=8", Schedule(micro_batch=8)),
        _compiled("stages 4|16|all", _cut((_EARLY, 4), ("features_6_conv_2", 16))),
        _compiled("stages 4|16 in m=16", _cut(("features_4_conv_2", 4), last=16, micro=16)),
        _compiled("streamed by 32, whole batch", Schedule(stream=32)),
        _compiled("streamed by 32, m=8", Schedule(micro_batch=8, stream=32)),
    ],
    "mobilenet_v2_224": [
        _compiled("whole batch", Schedule()),
        _compiled("m=2", Schedule(micro_batch=2)),
        _compiled("stages 1|all", _cut((_EARLY, 1))),
        _compiled("stages 1|2|all", _cut((_EARLY, 1), ("features_6_conv_2", 2))),
        _compiled("streamed by 32, whole batch", Schedule(stream=32)),
        _compiled("streamed by 32, m=1", Schedule(micro_batch=1, stream=32)),
    ],
    "resnet50": [
        _compiled("whole batch", Schedule()),
        _compiled("m=4", Schedule(micro_batch=4)),
        _compiled("stages 1|all", _cut((_DOWN, 1))),
        _compiled("stages 1|all, branches in layer3 and layer4", _cut((_DOWN, 1)), "layer3,layer4"),
    ],
    "t_resnet": [
        _compiled("whole batch", Schedule()),
        _compiled("whole batch, contiguous", Schedule(), layout="contiguous"),
        _compiled("m=16", Schedule(micro_batch=16)),
        _compiled("m=16, branches where smaller", Schedule(micro_batch=16), "small:16"),
        _compiled("m=32, branches where smaller", Schedule(micro_batch=32), "small:32"),
    ],
}


def rows_of(net: str) -> dict[str, Row]:
    """The rows of a net by name, in the table's order; the first is what times are divided by."""
    return {r.name: r for r in [*_references(NETS[net].blocks), *_COMPILED[net]]}
