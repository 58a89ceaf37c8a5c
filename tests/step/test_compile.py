"""A compiled step against plain autograd: random networks, every schedule, float64; optimizers, errors, sources."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import backbones
import pytest
import torch
from hypothesis import given, seed, settings
from random_examples import PROFILE, examples, trains
from random_layers import Spec, batch, network
from small import Residual
from steps import by_autograd, check, gradients, graph_of, weighted, weights_for, worst
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.layers.fused import FusedConv
from floorplan.ledger.losses import cross_entropy
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.studied import crossings, ordered
from floorplan.step.timeline import measure, predict


def sites(gm: fx.GraphModule) -> tuple[str, ...]:
    return tuple(n.name for n in gm.graph.nodes if n.op == "call_module")


def schedules(gm: fx.GraphModule, x: Tensor) -> list[Schedule]:
    """One of each kind."""
    every, layout = sites(gm), "channels_last" if x.dim() == 4 else "contiguous"
    found = [Schedule(layout="contiguous"), Schedule(layout=layout, branches=every, reuse=every)]
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in gm.modules()):
        return found  # its statistics couple the samples
    found += [Schedule(micro_batch=2), Schedule(micro_batch=1, branches=every, layout=layout)]
    return found + [Schedule(stages=((c.name, 1),), last=2) for c, _ in crossings(ordered(gm))[::3]]


def run(spec: Spec, rank: int, where: str, seen: Counter[str]) -> None:
    model, x = network(spec).double(), batch(spec).double()
    try:
        gm = graph_of(model, x, rank, where)
    except FloorplanError as e:
        assert "no conv was adapted" in str(e)
        return
    gm.train("dropout" not in str(spec))
    found = schedules(gm, x)
    for k, s in enumerate([found[0], *found[1 + len(seen) % 2 :: 2]]):
        try:
            step = check(gm, (x,), s)
        except FloorplanError as e:
            assert "is no cut in order" in str(e), e
            continue
        if k == 1:
            target = weights_for(gm, (x,))
            assert predict(step, (x,), target).peak == measure(step, (x,), target).peak
        seen["whole" if not s.stages and not s.micro_batch else "parts"] += 1
        seen["regions"] += bool(step.fallback)


@pytest.mark.parametrize("shard", range(3))
def test_random_networks(shard: int) -> None:
    seen: Counter[str] = Counter()

    @seed(100 + shard)
    @settings(PROFILE, max_examples=9)
    @given(examples())
    def go(example: tuple[Spec, int, str]) -> None:
        if trains(example[0]):
            run(*example, seen)

    go()
    assert seen["whole"] >= 5 and seen["parts"] >= 4 and seen["regions"] >= 2, seen


@pytest.fixture(scope="module")
def t_resnet() -> tuple[fx.GraphModule, Tensor]:
    x = torch.randn(8, 97, 60, dtype=torch.float64)
    return graph_of(backbones.TResNet(width=8).double(), x), x


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(),
        Schedule(micro_batch=3),
        Schedule(layout="channels_last", micro_batch=5),
        Schedule(stages=(("blocks_0_conv3_conv", 3),), last=4),
        Schedule(stages=(("blocks_0_conv3_conv", 2), ("blocks_1_conv3_conv", 3)), micro_batch=5),
    ],
)
def test_t_resnet(t_resnet: tuple[fx.GraphModule, Tensor], schedule: Schedule) -> None:
    gm, x = t_resnet
    step = check(copy.deepcopy(gm), (x,), schedule)
    assert list(step.fallback) == ["unsqueeze"]
    target = weights_for(gm, (x,))
    assert predict(step, (x,), target).blocks == measure(step, (x,), target).blocks


def test_mean_losses_are_shared_out() -> None:
    x, y = torch.randn(7, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (7,))
    gm = graph_of(Residual().double(), x).eval()
    value, want = by_autograd(gm, (x,), y, torch.nn.functional.cross_entropy)
    for s in (Schedule(micro_batch=2), Schedule(stages=(("pool", 3),), last=2)):
        got = compile_step(gm, "cross_entropy", x, plan=s)(x, y)
        assert abs(float(got - value)) < 1e-12 and worst(gradients(gm), want) <= 1e-12


class TwoInputs(nn.Module):
    """Two inputs, two outputs, a shared conv, a broadcast skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(2, 6, 1)
        self.c, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.relu(self.a(x) + self.b(y))
        z = self.c(self.c(z)) + z.mean((2, 3), keepdim=True)
        return self.last(z), z.mean((2, 3))


@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(micro_batch=2), Schedule(layout="contiguous", micro_batch=1)]
)
def test_two_inputs_two_outputs(schedule: Schedule) -> None:
    x, y = torch.randn(3, 3, 6, 5, dtype=torch.float64), torch.randn(3, 2, 6, 5, dtype=torch.float64)
    check(graph_of(TwoInputs().double(), (x, y), 1), (x, y), schedule)


def test_an_optimizer_follows_and_training_goes_down() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))
    gm = graph_of(Residual(), x, train_head=True).eval()
    step = compile_step(gm, "cross_entropy", x, plan=Schedule(micro_batch=5))
    optimizer = torch.optim.Adam([p for p in gm.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(float(step(x, y)))
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_gradients_are_added_and_other_sizes_work() -> None:
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    gm = graph_of(Residual().double(), x).eval()
    step = compile_step(gm, weighted, x, plan=Schedule(micro_batch=3), reduction="sum")
    for t in (x, torch.randn(5, 3, 11, 9, dtype=torch.float64)):
        target = weights_for(gm, (t,))
        _, want = by_autograd(gm, (t,), target)
        step(t, target)
        step(t, target)
        twice = {k: 2 * v for k, v in want.items()}
        assert worst(gradients(gm), twice) <= 1e-12


def test_frozen_sites_stay_frozen() -> None:
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    gm = graph_of(Residual().double(), x).eval()
    gm.get_submodule("stem").U.requires_grad_(False)
    step = check(gm, (x,), Schedule())
    assert "accumulate(s0" not in step.source and "b_stem" not in step.source


def test_the_source_is_what_runs_and_imports(tmp_path: Path) -> None:
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    gm = graph_of(Residual().double(), x).eval()
    step = check(gm, (x,), Schedule(layout="channels_last"))
    step.save(tmp_path / "step.py")
    space: dict[str, Any] = {}
    exec((tmp_path / "step.py").read_text(), space)
    target = weights_for(gm, (x,))
    value, want = by_autograd(gm, (x,), target)
    loss = space["make_step"](gm, weighted, mean=False)((x,), target)
    assert torch.allclose(loss, value) and worst(gradients(gm), want) <= 1e-12
    with pytest.raises(FloorplanError, match="exists already"):
        step.save(tmp_path / "step.py")


def test_schedules_are_plain_data() -> None:
    s = Schedule(16, (("a", 4), ("b", 8)), 16, "contiguous", ("c",), 0, ("d",))
    assert Schedule.of(json.loads(json.dumps(s.as_dict()))) == s
    assert str(s) == "micro-batch 16, stages 4|8|16 cut at a, b" and str(Schedule()) == "whole batch"


@pytest.mark.parametrize(
    "data", [{"micro_batch": -1}, {"micro_batch": "x"}, {"stages": [["a", 1.5]]}, {"stages": 3}, {"last": True}]
)
def test_what_is_no_schedule(data: dict[str, Any]) -> None:
    with pytest.raises(FloorplanError, match="schedule: "):
        Schedule.of(data)


def test_errors_are_one_line() -> None:
    x = torch.randn(3, 3, 8, 8)
    gm = graph_of(Residual(), x)
    cases: list[tuple[str, Any]] = [
        ("no adapted graph", lambda: compile_step(Residual(), "mse", x)),  # type: ignore[arg-type]
        ("loss no: not known", lambda: compile_step(gm, "no", x)),
        ("more than one value crosses", lambda: compile_step(gm, "mse", x, plan=Schedule(stages=(("conv", 2),)))),
        ("layout odd: not known", lambda: compile_step(gm, "mse", x, plan=Schedule(layout="odd"))),
        ("takes 1 inputs and a target", lambda: compile_step(gm, "mse", x)(x)),
    ]
    for words, call in cases:
        with pytest.raises(FloorplanError, match=words) as e:
            call()
        assert "\n" not in str(e.value)


def test_batch_statistics_are_not_split() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    x = torch.randn(4, 3, 6, 6)
    gm = graph_of(model, x)
    if not any(isinstance(m, nn.BatchNorm2d) for m in gm.modules()):
        gm.add_submodule("norm", nn.BatchNorm2d(4))
    with pytest.raises(FloorplanError, match="normalises by the batch"):
        compile_step(gm.train(), "sum", x, plan=Schedule(micro_batch=2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, device="cuda")
    check(graph_of(Residual().double().cuda(), x).eval(), (x,), Schedule(micro_batch=3))


@pytest.mark.parametrize("name", ["bias", "weight", "P", "scale"])
@pytest.mark.parametrize("plan", [Schedule(), Schedule(micro_batch=2)])
def test_what_its_owner_lets_train_gets_its_gradient(name: str, plan: Schedule) -> None:
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    gm, y = graph_of(Residual().double(), x).eval(), torch.arange(5) % 5
    own = []
    for s in (m for m in gm.modules() if isinstance(m, FusedConv) and m.rank):
        s.scale = torch.rand(s.out_channels, dtype=torch.float64) + 0.5
        own.append(getattr(s, name).requires_grad_(True))
    assert len(own) == 3
    value = cross_entropy(gm(x), y)
    trained = [*own, *(p for p in gm.parameters() if p.requires_grad)]
    want = torch.autograd.grad(value, trained)
    got = compile_step(gm, "cross_entropy", x, plan=plan)(x, y)
    assert abs(float(got - value)) <= 1e-12
    for t, g in zip(trained, want, strict=True):
        assert t.grad is not None and float((t.grad - g).abs().max()) <= 1e-12 * max(1.0, float(g.abs().max()))
