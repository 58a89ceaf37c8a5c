"""Every method by name: it rewrites, its figures agree, it starts as its source, it can be saved."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import randomize
from torch import Tensor, fx, nn

import floorplan
from floorplan.api import Rewritten
from floorplan.errors import FloorplanError
from floorplan.graph import driver
from floorplan.graph.driver import Pass
from floorplan.graph.trace import trace
from floorplan.methods.catalogue import METHODS, Options, method

CONVS, NORMS = ("0", "3"), ("1", "4")


def source() -> nn.Module:
    """Two conv-BatchNorm-ReLU, a pool and a head."""
    torch.manual_seed(0)
    return randomize(
        nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )
    )


def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4, 8, 8)


@cache
def rewritten(name: str) -> Rewritten:
    return floorplan.rewrite(source(), images(), method=name)


def unverified(name: str, options: Options) -> fx.GraphModule:
    """The source under a method, quickly."""
    traced = trace(source(), (images(),), both_modes=True)
    return driver.rewrite(traced.gm, method(name).passes(options), lambda *_: None)[0].train()


def module(name: str) -> fx.GraphModule:
    """A copy for each test: one that runs it in train mode moves its BatchNorms."""
    return copy.deepcopy(rewritten(name).module).train()


def trained(gm: nn.Module) -> set[str]:
    return {n for n, p in gm.named_parameters() if p.requires_grad}


def named(paths: tuple[str, ...], *names: str) -> set[str]:
    return {f"{p}.{n}" for p in paths for n in names}


EVERY = trained(source())
# TinyTL's lite residuals stand beside blocks of several convs, which this net has none of.
HERE = [name for name in METHODS if not name.startswith("tinytl")]
# method -> what trains, and whether its BatchNorms use the batch's statistics meanwhile
TABLE: dict[str, tuple[set[str], bool]] = {
    "full": (EVERY, True),
    "bias": ({"0.bias", "1.bias", "4.bias"}, True),
    "bn": (named(NORMS, "weight", "bias"), True),
    "lora-c": (named(CONVS, "A", "B"), True),
    "lora-c-official": (named(CONVS, "A", "B"), True),
    "lora-conv": (named(CONVS, "A", "B"), True),
    "lora-edge": (named(CONVS, "U"), True),
    "lora-fa": (named(CONVS, "U"), True),
    "memflora": (named(CONVS, "U"), False),
    "memflora-paper": (named(CONVS, "U"), False),
    "memflora-sg": (named(CONVS, "U"), False),
}


@pytest.mark.parametrize("name", HERE)
def test_predicted_is_measured(name: str) -> None:
    report = rewritten(name).report
    for side in (report.before, report.after):
        assert side.difference is not None and set(side.difference.values()) == {0}
    assert report.after.method == report.options["method"] == name
    assert report.after.predicted.trainable_parameters == sum(
        p.numel() for p in module(name).parameters() if p.requires_grad
    )


@pytest.mark.parametrize("name", HERE)
def test_starts_as_the_source(name: str) -> None:
    x = images()
    with torch.no_grad():
        got, want = module(name).eval()(x), source().eval()(x)
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    if method(name).bn_trains:
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", HERE)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    gm, path, x = module(name), tmp_path / "adapted.pt", images()
    floorplan.save(gm, path)
    back = floorplan.load(path)
    assert trained(back) == trained(gm) and back.meta["floorplan"]["method"] == name
    state = gm.state_dict()
    assert back.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in back.state_dict().items())
    with torch.no_grad():
        assert torch.equal(back.eval()(x), gm.eval()(x))


@pytest.mark.parametrize("name", TABLE)
def test_what_trains_and_how_batchnorms_run(name: str) -> None:
    gm, (want, moves) = module(name), TABLE[name]
    assert trained(gm) == want and method(name).bn_trains is moves
    before = {n: t.clone() for n, t in gm.named_buffers()}
    with torch.no_grad():
        gm(images())
    norms = [m for m in gm.modules() if isinstance(m, nn.BatchNorm2d)]
    moved = [n for n, t in gm.named_buffers() if not torch.equal(t, before[n])]
    stays = ("running_mean", "running_var", "num_batches_tracked")
    assert set(moved) == (named(NORMS, *stays) if moves else set()) and len(norms) == 2 * moves
    for n, t in gm.named_buffers():
        t.copy_(before[n])


@pytest.mark.parametrize("name", TABLE)
def test_a_step_gives_every_trained_tensor_a_gradient(name: str) -> None:
    gm = module(name)
    before = {n: t.clone() for n, t in gm.named_buffers()}
    gm(images()).square().sum().backward()
    grads = {n for n, p in gm.named_parameters() if p.grad is not None}
    gm.zero_grad()
    for n, t in gm.named_buffers():
        t.copy_(before[n])
    assert grads == trained(gm)


def test_zero_shot_trains_and_keeps_nothing() -> None:
    gm = module("zero-shot")
    assert trained(gm) == set() and rewritten("zero-shot").report.after.predicted.saved == 0
    assert not gm(images()).requires_grad


def test_a_trained_head_joins_what_trains() -> None:
    for name in ("bias", "lora-edge", "memflora"):
        gm = unverified(name, Options(train_head=True))
        assert trained(gm) == TABLE[name][0] | {"8.weight", "8.bias"}


def test_methods_that_replace_no_layer_take_no_rank() -> None:
    for name in ("zero-shot", "full", "bias", "bn"):
        assert not method(name).ranked
        gm = unverified(name, Options(rank=10**6))
        assert gm.state_dict().keys() == source().state_dict().keys()
    assert all(method(n).ranked for n in TABLE if n not in ("full", "bias", "bn"))


def test_only_memflora_sg_replays_and_only_adapters_that_are_linear_merge() -> None:
    assert [n for n, m in METHODS.items() if m.replays] == ["memflora-sg"]
    assert {n for n in TABLE if not METHODS[n].merges} == {"full", "bias", "bn"}


def test_every_pipeline_has_passes_of_distinct_names() -> None:
    for m in METHODS.values():
        line: Any = m.passes(Options())
        names = [p.name for p in line]
        assert names and all(isinstance(p, Pass) for p in line) and len(set(names)) == len(names)
        assert m.summary and m.name in METHODS and method(m.name) is m


@pytest.mark.parametrize("name", sorted(METHODS.keys() - HERE))
def test_a_method_that_fits_nowhere_says_so(name: str) -> None:
    with pytest.raises(FloorplanError, match="^Sequential: tinytl: no lite residual fits"):
        floorplan.rewrite(source(), images(), method=name, measured=False)


def test_an_unknown_method_is_told_all_names() -> None:
    with pytest.raises(FloorplanError, match="^method lora: not known; use zero-shot, full, bias") as e:
        floorplan.rewrite(source(), images(), method="lora")
    assert all(name in str(e.value) for name in METHODS) and "\n" not in str(e.value)
