"""Random small CNNs: the ledger against reality, the rewrite against plain autograd."""

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given, seed, settings
from random_examples import PROFILE, examples, loss, tensors, trains
from random_layers import Spec, batch, layer, network
from torch import Tensor, fx, nn
from torch.func import functional_call

import floorplan
from floorplan.errors import FloorplanError
from floorplan.layers.fused import FusedConv
from floorplan.ledger.criterion import Proof
from floorplan.methods.verify import randomize_adapters

# Networks of each shard, and whether the proof runs too: it takes half of the time.
PLAN = [(10, True)] * 2 + [(24, False)] * 8


def gap(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry wanted, or over `floor` where that is larger."""
    assert got.shape == want.shape
    scale = max(float(want.abs().max()), floor)
    return float((got - want).abs().max()) / (scale or 1.0)


def adapted_convs(gm: nn.Module, source: nn.Module) -> dict[str, FusedConv]:
    """Each adapted conv of the source, by its path; twins of a shared conv hold the same U."""
    found: dict[int, tuple[str, FusedConv]] = {}
    for path, m in gm.named_modules():
        if isinstance(m, FusedConv) and m.U is not None:
            found.setdefault(id(m.U), (path, m))
    sites = dict(found.values())
    for path, site in sites.items():
        assert source.get_submodule(path).get_parameter("weight").shape == site.weight.shape
    return sites


def adapter(site: FusedConv) -> Tensor:
    """U of an adapted site."""
    assert site.U is not None
    return site.U


def branch(site: FusedConv, u: Tensor) -> Tensor:
    """U after P as one conv weight, group by group: the two branches multiplied out."""
    p = site.P
    assert p is not None
    if site.geo.transposed:  # weight (I, O/g, *k), U (g, r, O/g, *k)
        return torch.cat([torch.einsum("ro...,ri->io...", u[j], p[j]) for j in range(len(p))])
    parts = u.chunk(len(p), dim=0)
    return torch.cat([torch.einsum("or...,ri->oi...", part, p[j]) for j, part in enumerate(parts)])


def reference(source: nn.Module, gm: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of every U by plain autograd on the source model in eval mode."""
    plain = copy.deepcopy(source).eval().requires_grad_(False)
    sites = adapted_convs(gm, plain)
    us = {path: adapter(site).detach().clone().requires_grad_() for path, site in sites.items()}
    names = {p: f"{p}.weight" for p in sites}
    weights = {names[p]: plain.get_parameter(names[p]) + branch(s, us[p]) for p, s in sites.items()}
    out = functional_call(plain, weights, (x,))
    grads = torch.autograd.grad(loss(out), list(us.values()), allow_unused=True)
    found = {p: torch.zeros_like(us[p]) if g is None else g for p, g in zip(us, grads, strict=True)}
    return [t.detach() for t in tensors(out)], found


def check_gradients(gm: nn.Module, source: nn.Module, x: Tensor) -> None:
    """Every U's gradient against the reference, U drawn at random, in float64."""
    randomize_adapters(gm)
    outputs, want = reference(source, gm, x.clone())
    out = gm(x.clone())
    torch.autograd.backward(loss(out))
    for got, wanted in zip(tensors(out), outputs, strict=True):
        assert gap(got.detach(), wanted) <= 1e-11
    # A BatchNorm by batch statistics makes some gradients zero but for rounding.
    floor = 1e-3 * max(float(g.abs().max()) for g in want.values())
    for path, site in adapted_convs(gm, source).items():
        up = adapter(site)
        grad = torch.zeros_like(up) if up.grad is None else up.grad
        assert gap(grad, want[path], floor) <= 1e-10, path


def kept_floats(gm: nn.Module, x: Tensor) -> list[Tensor]:
    """Float tensors that autograd is handed in a real step, model state and the input apart."""
    apart = {t.untyped_storage().data_ptr() for t in [x, *gm.parameters(), *gm.buffers()]}
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.untyped_storage().data_ptr() not in apart:
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gm(x)
    return kept


def bottlenecks(gm: nn.Module, x: Tensor) -> int:
    """Elements of the largest q of any site."""
    sizes = [0]

    def see(m: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(m, FusedConv)
        b, _, *positions = args[0].shape
        steps = m.geo.stride if m.geo.sampled else (1,) * len(positions)
        sampled = [-(-n // s) for n, s in zip(positions, steps, strict=True)]
        sizes.append(b * m.geo.groups * m.rank * math.prod(sampled))

    sites = [m for m in gm.modules() if isinstance(m, FusedConv) and m.rank]
    hooks = [m.register_forward_pre_hook(see) for m in sites]
    with torch.no_grad():
        gm(x)
    for h in hooks:
        h.remove()
    return max(sizes)


def check_floor(gm: nn.Module, x: Tensor) -> None:
    """At the floor, what is kept in full precision is a bottleneck or independent of the batch."""
    most = bottlenecks(gm, x)
    once, twice = kept_floats(gm, x), kept_floats(gm, torch.cat((x, x)))
    assert len(once) == len(twice)
    for a, b in zip(once, twice, strict=True):
        size, doubled = (t.untyped_storage().nbytes() // t.element_size() for t in (a, b))
        assert size == doubled or size <= most


def rewritten(model: nn.Module, x: Tensor, rank: int, sites: str, measured: bool = True) -> Any:
    """The rewrite; None if it may be refused: no conv that the rank fits."""
    try:
        return floorplan.rewrite(model, x, rank=rank, sites=sites, measured=measured)
    except FloorplanError as e:
        assert "\n" not in str(e)
        assert "no conv was adapted" in str(e), e
        return None


def agree(report: Any) -> None:
    """Predicted equals measured to the byte, in every figure."""
    assert not any(report.difference.values()), (report.difference, str(report))


def run_example(spec: Spec, rank: int, sites: str) -> str:
    """All claims on one network; what became of it."""
    model, x = network(spec), batch(spec)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = rewritten(model, x, rank, sites)
        if result is None:
            agree(floorplan.check(model, x, measured=True))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training == spec["train"]
    if result is None:
        return "refused"
    agree(result.report.before)
    agree(result.report.after)
    gm: fx.GraphModule = result.module
    with torch.no_grad():
        got_wanted = [copy.deepcopy(gm).eval()(x.clone()), model.eval()(x.clone())]
    for got, want in zip(*map(tensors, got_wanted), strict=True):
        assert gap(got, want) <= (1e-12 if spec["double"] else 1e-5)
    if result.report.after.verdict == "AT_FLOOR":
        check_floor(copy.deepcopy(gm).train(), x.clone())
    verdict = str(result.report.after.verdict)
    if not spec["double"]:
        model, x = model.double(), x.double()
        gm = rewritten(model, x, rank, sites, measured=False).module
    gm.train("dropout" not in str(spec))  # the reference drops nothing
    check_gradients(gm, model, x)
    return verdict


def unproved(*args: Any, **kwargs: Any) -> tuple[Proof, tuple[str, ...], None]:
    """Stands in for the symbolic proof, which takes half of the time and changes no figure."""
    return Proof("UNPROVEN", (), {}, {}, ()), (), None


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, for maps this small; threads and garbage collection as they were afterwards."""
    # What is old is frozen here once in a while; asking how much is, at every run, takes a third of the time.
    monkeypatch.setattr("floorplan.ledger.run._young_garbage", nullcontext)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.mark.parametrize("shard", range(len(PLAN)))
def test_random_networks(shard: int, small_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures and gradients of every network, the verdict in some shards."""
    count, proved = PLAN[shard]
    if not proved:
        monkeypatch.setattr("floorplan.ledger.analyze._proved", unproved)
    seen: Counter[str] = Counter()

    @seed(shard)
    @settings(PROFILE, max_examples=count)
    @given(examples())
    def run(example: tuple[Spec, int, str]) -> None:
        if sum(seen.values()) % 8 == 1:
            # The census collects garbage at every run: what is alive now need not be looked at.
            gc.collect()
            gc.freeze()
        assume(trains(example[0]))
        seen[run_example(*example)] += 1

    run()
    reached = seen["AT_FLOOR" if proved else "UNPROVEN"]  # narrow nets: a bottleneck is often as wide as its map
    assert reached >= (1 if proved else count // 6), f"the draws have become vacuous: {seen}"


def bn_alone() -> nn.Module:
    """Only the BatchNorm trains: the real backward makes no gradient of its input."""
    model = nn.Sequential(nn.Conv1d(3, 9, 1), nn.BatchNorm1d(9), nn.AdaptiveAvgPool1d(1)).eval()
    model[0].requires_grad_(False)
    return model


def held_by_a_frame() -> nn.Module:
    """Frozen, so that the peak is in the forward, where nn.Sequential holds what the conv pads."""
    spec: Spec = {
        "in": 3,
        "out": 2,
        "kernel": [5],
        "stride": [3],
        "dilation": [1],
        "padding": 0,
        "groups": 1,
        "bias": True,
        "mode": "zeros",
        "kind": "conv",
        "nd": 1,
        "pad": [4, 4],
        "pad_mode": "reflect",
    }
    frozen = nn.Sequential(nn.Tanh(), layer(spec)).requires_grad_(False)
    return nn.Sequential(frozen, nn.Conv1d(2, 2, 1))


def shrinking() -> nn.Module:
    """A float64 3-D transposed conv keeps its result in memory of its input's size."""
    return nn.Sequential(nn.Conv3d(3, 8, 3), nn.ConvTranspose3d(8, 2, 2), nn.BatchNorm3d(2))


class Unread(nn.Module):
    """Its dead branch frees what it saved, and a later layer may get the same address."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.dead = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch.sigmoid(self.dead(x))
        return torch.sigmoid(self.b(x).tanh())


@pytest.mark.parametrize("make", [bn_alone, held_by_a_frame, shrinking, Unread])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_found_before(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """What random networks once showed to be predicted wrongly."""
    model = make().to(dtype)
    nd = next(m.weight.dim() for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)) - 2
    agree(floorplan.check(model, torch.randn(2, 3, *[12] * nd, dtype=dtype), measured=True))
