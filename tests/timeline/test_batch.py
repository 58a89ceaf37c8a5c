"""The timeline as a function of batch and rank: fresh runs of other sizes agree to the byte."""

from collections.abc import Iterator

import pytest
import torch
from graphs import randomize
from hard_nets import Lambda, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph import driver
from floorplan.graph.trace import trace
from floorplan.ledger.inputs import resized
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step
from floorplan.methods.catalogue import Options, method
from floorplan.timeline.batch import BatchTimeline, in_batch, in_rank
from floorplan.timeline.blocks import Block, StepTimeline
from floorplan.timeline.run import step_timeline
from tests.examples.test_backbones import factory, window
from tests.timeline.test_run import NETS, XENT, by


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> Iterator[None]:
    """With one, torch takes other kernels for batches below 16, and no one form holds on either side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


BATCHES = (1, 2, 3, 7, 12, 24, 33)


def fresh(gm: fx.GraphModule, x: Tensor, target: Tensor, batch: int, loss: str = "cross_entropy") -> StepTimeline:
    return step_timeline(Step(gm, (resized(x, batch),), resized(target, batch), LOSSES[loss]))


def agrees(found: BatchTimeline, gm: fx.GraphModule, x: Tensor, target: Tensor, batches: tuple[int, ...]) -> None:
    """Blocks, peak and state at each batch; the lines too where packed masks fill whole bytes."""
    for batch in batches:
        want = fresh(gm, x, target, batch)
        assert found.at(batch) == want and found.peak(batch) == want.peak and found.total(batch) == want.total
        lines = max(line.constant + line.slope * batch for line in found.peak_lines())
        assert lines == want.peak if batch % 8 == 0 else want.peak - len(want.blocks) < lines <= want.peak


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("how", ["full", "memflora"])
def test_other_batches(name: str, how: str) -> None:
    make, shape = NETS[name]
    gm, x = by(randomize(make()), (torch.randn(2, *shape),), how), torch.randn(4, *shape)
    batches = BATCHES if how == "memflora" else BATCHES[1:]  # BatchNorm has no statistics of one value
    target = target_for(gm, (x,), "cross_entropy")
    agrees(in_batch(gm, (x,), target, XENT), gm, x, target, batches)


@pytest.fixture(scope="module")
def ranked() -> tuple[dict[int, fx.GraphModule], Tensor]:
    model = factory("t_resnet")()
    x = window(model, 2)
    source = trace(model, (x,), both_modes=True).gm
    passes = {r: method("memflora").passes(Options(r)) for r in (2, 3, 7)}
    return {r: driver.rewrite(source, p, lambda *_: None)[0].train() for r, p in passes.items()}, x


def test_batch_and_rank(ranked: tuple[dict[int, fx.GraphModule], Tensor]) -> None:
    models, x = ranked
    target = target_for(models[2], (x,), "cross_entropy")
    found = in_rank({r: models[r] for r in (3, 2)}, (x,), target, XENT)
    for rank, gm in models.items():
        agrees(found.at_rank(rank), gm, x, target, (5, 16))
    with pytest.raises(FloorplanError, match=r"^timeline: ranks \[2, 7\] were given; give two that differ by one"):
        in_rank({r: models[r] for r in (2, 7)}, (x,), target, XENT)


def test_one_sample_may_take_other_kernels() -> None:
    """torch's own transposed 3-D convolution, taken for one sample, needs its input's size."""
    x = torch.randn(2, 8, 4, 6, 6)
    net = nn.Sequential(
        nn.Conv3d(8, 12, 3, padding=1, bias=False),
        nn.BatchNorm3d(12),
        nn.ReLU6(),
        nn.MaxPool3d(2),
        nn.Conv3d(12, 16, 1),
        nn.Hardtanh(),
        nn.Flatten(),
        nn.Linear(16 * 18, 4),
    )
    models, source = {}, trace(randomize(net), (x,), both_modes=True).gm
    for rank in (2, 3, 5):
        models[rank] = driver.rewrite(source, method("memflora").passes(Options(rank)), lambda *_: None)[0].train()
    target = target_for(models[2], (x,), "cross_entropy")
    found = in_rank({r: models[r] for r in (2, 3)}, (x,), target, XENT)
    for rank, gm in models.items():
        agrees(found.at_rank(rank), gm, x, target, (1, 2, 9))


def test_half_filled_bytes_are_counted() -> None:
    """3 channels of 5x5 positions: 75 bits a sample."""
    torch.manual_seed(0)
    model = nn.Sequential(same(2, 3), nn.ReLU(), same(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3))
    x = torch.randn(2, 2, 5, 5)
    gm = by(model, (x,), "memflora")
    target = target_for(gm, (x,), "cross_entropy")
    found = in_batch(gm, (x,), target, XENT)
    agrees(found, gm, x, target, tuple(range(1, 18)))
    gates = [b for b in found.at(3).blocks if b.role == "gate"]
    assert gates and all(b.nbytes == 29 and b.shape == (29,) for b in gates)
    assert any(line.slope % 1 for line in found.peak_lines())


def test_an_optimizer_and_a_replay() -> None:
    make, shape = NETS["3-d"]
    gm, x = by(randomize(make()), (torch.randn(2, *shape),), "memflora-sg"), torch.randn(4, *shape)
    target = target_for(gm, (x,), "cross_entropy")
    found = in_batch(gm, (x,), target, XENT, replays=True, optimizer="adam", name="sg")
    options = {"replays": True, "optimizer": "adam", "name": "sg"}
    want = step_timeline(Step(gm, (resized(x, 11),), resized(target, 11), XENT), **options)  # type: ignore[arg-type]
    assert found.at(11) == want and {b.direction for b in want.blocks} >= {"replay", "optimizer"}


def hand(*forms: tuple[int, int, int, int]) -> BatchTimeline:
    """Blocks (born, died, constant, slope) in bytes."""
    events = len(forms)
    blocks = [Block(b, d, c + 8 * s, f"n{b}", "forward", "op", (1,), "float32", "temporary") for b, d, c, s in forms]
    bits = tuple((8 * c, 8 * s) for _, _, c, s in forms)
    return BatchTimeline(StepTimeline("", tuple(blocks), events), bits, (((1, 0),),) * events, ())


def test_lines_by_hand() -> None:
    found = hand((0, 1, 100, 0), (1, 2, 40, 10), (2, 3, 20, 10), (3, 4, 0, 11), (4, 5, 80, 2))
    assert [(line.constant, line.slope, line.event, line.node) for line in found.peak_lines()] == [
        (100, 0, 0, "n0"),
        (40, 10, 1, "n1"),
        (0, 11, 3, "n3"),
    ]
    assert [found.peak(b) for b in (1, 6, 7, 40, 41)] == [100, 100, 110, 440, 451]
    assert hand().peak_lines() == [] and hand().peak(3) == 0


FORM = st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 60), st.integers(0, 9))


@settings(deadline=None)
@given(st.lists(FORM, min_size=1, max_size=6))
def test_lines_are_the_peak_at_every_batch(drawn: list[tuple[int, int, int, int]]) -> None:
    n = len(drawn)
    found = hand(*((i, min(n, i + lasts), c, s) for i, (_, lasts, c, s) in enumerate(drawn)))
    lines = found.peak_lines()
    for batch in range(1, 80):
        assert max(line.constant + line.slope * batch for line in lines) == found.peak(batch)
    assert [line.slope for line in lines] == sorted({line.slope for line in lines})


def test_another_order_of_events_is_refused_by_name() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return m.pick(m.c1(x))

    class Pick(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return torch.tanh(y) if y.shape[0] > 10 else torch.relu(y)

    root = Lambda(run, c1=same(3, 4), pick=Pick())
    net = fx.GraphModule(root, _Whole().trace(root))
    x = torch.randn(2, 3, 5, 5)
    message = r"^timeline: pick \(forward\): event \d+ is aten.relu.default at batch 8, aten.tanh.default of pick"
    with pytest.raises(FloorplanError, match=message):
        in_batch(net, (x,), target_for(net, (x,), "sum"), LOSSES["sum"])


class _Whole(fx.Tracer):
    """Sees every submodule as one call."""

    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return bool(path)


def test_sizes_that_are_no_line_are_refused_by_name() -> None:
    def pairs(m: nn.Module, x: Tensor) -> Tensor:
        y = m.c1(x).mean((2, 3))
        return y @ y.t()

    x = torch.randn(2, 3, 5, 5)
    net = fx.symbolic_trace(Lambda(pairs, c1=same(3, 4)))
    with pytest.raises(FloorplanError, match=r"^timeline: matmul \(forward\): aten.mm.default makes 100 bytes at b"):
        in_batch(net, (x,), torch.zeros(2), LOSSES["sum"])


def test_no_batch() -> None:
    with pytest.raises(FloorplanError, match="^timeline: a batch of 0 is no step; give 1 or more$"):
        hand((0, 1, 4, 4)).at(0)


def test_other_sizes_keep_memory_order_and_what_is_no_tensor() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = resized(x, 7)
    assert y.shape == (7, 3, 4, 5) and y.is_contiguous(memory_format=torch.channels_last) and y.requires_grad
    assert resized(torch.zeros(2, dtype=torch.int64), 5).dtype == torch.int64
    assert resized(3, 5) == 3 and resized(torch.tensor(1.0), 5).dim() == 0
