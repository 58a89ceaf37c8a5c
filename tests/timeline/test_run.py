"""One step's timeline: predicted equals measured, block by block, and it is what other figures say."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example import factory, window
from graphs import randomize
from hard_models import build
from small_step import adapted, images
from torch import Tensor, fx, nn

from floorplan.graph import driver
from floorplan.graph.trace import trace
from floorplan.ledger.analyze import analyze
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step, run
from floorplan.ledger.step_figures import step_figures
from floorplan.ledger.storage import StorageTracker
from floorplan.methods.catalogue import METHODS, Options, method
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.run import step_timeline, timeline_of

XENT = LOSSES["cross_entropy"]
TINY = [n for n in METHODS if n.startswith("tinytl")]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other longer than these small steps run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(
    gm: fx.GraphModule, inputs: tuple[Any, ...], loss: str = "cross_entropy", replays: bool = False, **options: Any
) -> StepTimeline:
    """The predicted timeline, which must be the measured one."""
    step = Step(gm, inputs, target_for(gm, inputs, loss), LOSSES[loss], replays=replays)
    found, real = (step_timeline(step, fake=fake, **options) for fake in (True, False))
    for a, b in zip(found.blocks, real.blocks, strict=False):
        assert a == b
    assert found == real
    return found


def by(model: nn.Module, inputs: tuple[Any, ...], name: str) -> fx.GraphModule:
    """A model under a method, in train mode."""
    traced = trace(model, inputs, both_modes=True)
    return driver.rewrite(traced.gm, method(name).passes(Options()), lambda *_: None)[0].train()


@pytest.mark.parametrize("name", [n for n in METHODS if n not in TINY])
def test_every_method(name: str) -> None:
    gm, x, replays = adapted(name).train(name != "zero-shot"), images(5), METHODS[name].replays
    found = both(gm, (x,), replays=replays)
    figures = step_figures(Step(gm, (x,), target_for(gm, (x,), "cross_entropy"), XENT, replays=replays))
    assert (found.peak, found.total) == (figures.requested_peak, figures.total)
    if not replays:  # whose formula also counts one input of a site
        assert found.training_state_peak == figures.training_state_peak
    ways = {b.direction for b in found.blocks}
    assert ("backward" in ways) == (name != "zero-shot") and ("replay" in ways) == replays
    trains = {n for n, m in gm.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))}
    names = {n.name for n in gm.graph.nodes if n.op == "call_module" and _holds(str(n.target), trains)}
    assert names <= {b.node for b in found.blocks if b.role == "gradient"}
    assert {b.node for b in found.blocks} <= {n.name for n in gm.graph.nodes} | {"loss"}


def _holds(path: str, modules: set[str]) -> bool:
    return any(m == path or m.startswith(f"{path}.") for m in modules)


@pytest.mark.parametrize("name", ["mobilenet_v2", "t_resnet"])
@pytest.mark.parametrize("how", ["full", "memflora"])
def test_the_backbones(name: str, how: str) -> None:
    model = factory(name)()
    gm = by(model, (window(model, 2),), how)
    x = window(model, 3)
    found = both(gm, (x,))
    figures = step_figures(Step(gm, (x,), target_for(gm, (x,), "cross_entropy"), XENT))
    assert found.peak == figures.requested_peak


class UNet(nn.Module):
    """Down, up by interpolation, a skip by concatenation, a head on every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.an = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.c, self.cn = nn.Conv2d(24, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.an(self.a(x)))
        b = F.relu(self.bn(self.b(F.max_pool2d(a, 2))))
        b = F.interpolate(b, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(F.relu(self.cn(self.c(torch.cat((a, b), 1)))))


class Gated(nn.Module):
    """GroupNorm, SiLU and squeeze-excite: nothing of it can be gated."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()
        self.down, self.up, self.fc = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x)))
        y = y * torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return self.fc((x.mean(1, keepdim=True) + y).mean((2, 3)))


def line() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, groups=2),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def volume() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm3d(6),
        nn.ReLU6(),
        nn.MaxPool3d(2),
        nn.Conv3d(6, 8, 1),
        nn.Hardtanh(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "u-net": (UNet, (3, 8, 8)),
    "gated": (Gated, (3, 6, 6)),
    "1-d": (line, (3, 18)),
    "3-d": (volume, (3, 4, 6, 6)),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("how", ["full", "memflora", "memflora-sg"])
def test_other_shapes_of_nets(name: str, how: str) -> None:
    make, shape = NETS[name]
    gm = by(randomize(make()), (torch.randn(2, *shape),), how)
    found = both(gm, (torch.randn(5, *shape),), replays=METHODS[how].replays)
    assert {b.role for b in found.blocks} > {"temporary", "gradient", "output"}


@pytest.mark.parametrize(
    "name",
    [
        "leaky-relu-keeps-its-input",
        "grouped-deconv",
        "conv-lstm",
        "spectral-norm",
        "ordered-dict-output",
        "channels-last",
        "checkpointed",
        "one-conv-in-a-loop",
    ],
)
def test_hard_models(name: str) -> None:
    model, inputs = build(name)
    both(trace(model, inputs).gm.train(), inputs, "sum")


@pytest.mark.parametrize("how", TINY)
def test_lite_residuals(how: str) -> None:
    model = factory("mobilenet_v2")()
    both(by(model, (window(model, 2),), how), (window(model, 2),))


def test_a_linear_layer_by_hand() -> None:
    gm, x = trace(nn.Linear(10, 3), (torch.randn(5, 10),)).gm, torch.randn(5, 10)
    found = both(gm, (x,), "mse", name="linear")
    assert found.name == "linear" and found.state == (("model", 132), ("optimizer", 264), ("batch", 260))
    out, *_ = found.blocks
    assert (out.direction, out.nbytes, out.shape, out.role) == ("forward", 60, (5, 3), "other")  # the loss keeps it
    assert Counter(b.role for b in found.blocks)["gradient"] == 2
    assert all(b.died == found.events for b in found.blocks if b.role == "gradient")


def test_pillars_are_those_of_the_proof() -> None:
    for how in ("full", "memflora"):
        gm, x = adapted(how), images(5)
        proof = analyze(gm, (x,)).proof
        found = step_timeline(Step(gm, (x,), target_for(gm, (x,), "cross_entropy"), XENT))
        want, got = Counter[str](), Counter[str]()
        for e in {e.storage: e for e in reversed(proof.kept)}.values():  # a storage counts where it was saved first
            want[e.pillar] += e.nbytes
        for b in found.blocks:
            if b.direction == "forward" and b.role not in ("gradient", "output", "temporary"):
                got[b.role] += b.nbytes
        assert got == want


def test_backward_storages_carry_the_node_whose_backward_it_is() -> None:
    gm, x = adapted("full"), images(5)
    found = both(gm, (x,))
    convs = {n.name: gm.get_submodule(str(n.target)) for n in gm.graph.nodes if n.op == "call_module"}
    weights = {n: tuple(m.weight.shape) for n, m in convs.items() if isinstance(m, nn.Conv2d)}
    for node, shape in weights.items():
        assert (node, shape, "backward", "gradient") in {(b.node, b.shape, b.direction, b.role) for b in found.blocks}
    assert sum(b.role == "gradient" for b in found.blocks) == len(list(gm.parameters()))


def test_measuring_leaves_the_model_as_it_was() -> None:
    gm, x = adapted("memflora-sg"), images(5)
    gm(x).sum().backward()
    state, rng = copy.deepcopy(gm.state_dict()), torch.get_rng_state()
    grads = [p.grad for p in gm.parameters()]
    both(gm, (x,), replays=True)
    assert all(torch.equal(t, state[n]) for n, t in gm.state_dict().items())
    assert all(p.grad is g for p, g in zip(gm.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_any_call() -> None:
    def drive(model: nn.Module, given: tuple[Any, ...], tracker: StorageTracker) -> Tensor:
        w, (x,) = model.weight, given
        tracker.enter("a")
        y = (x * 2) @ w.detach()
        tracker.enter("b", "backward")
        w.grad = torch.ones_like(w)
        return y.relu()

    step = Step(nn.Linear(4, 6, bias=False), (torch.randn(5, 6),), drive=drive)
    found = timeline_of(run(step, fake=False), "by hand")
    assert [(b.node, b.direction, b.nbytes, b.role) for b in found.blocks] == [
        ("a", "forward", 120, "temporary"),
        ("a", "forward", 80, "temporary"),
        ("b", "backward", 96, "gradient"),
        ("b", "backward", 80, "output"),
    ]
    assert [(b.born, b.died) for b in found.blocks] == [(0, 2), (1, 4), (2, 4), (3, 4)] and found.peak == 256
    assert timeline_of(run(step), "by hand") == found
