"""The adaptation loop: it learns, keeps the best, goes on after an interruption, stops at NaN."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floorplan
from floorplan.errors import FloorplanError
from floorplan.methods.train import adapt


def source() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 8, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return model.eval()


def batches(n: int = 6) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        y = torch.randint(0, 3, (16,), generator=g)
        out.append((torch.randn(16, 4, 12, generator=g) + y[:, None, None], y))
    return out


def weights(m: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in m.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


@pytest.mark.parametrize("name", ["full", "bn", "lora-c", "lora-edge", "memflora", "memflora-sg"])
def test_the_loss_falls_and_the_source_stays(name: str) -> None:
    model = source()
    before = weights(model)
    found = adapt(model, batches(), method=name, sites="all", steps=30, lr=6e-2, progress=False)
    assert same(weights(model), before)
    assert len(found.log.losses) == found.log.kept == 30 and not found.module.training
    assert sum(found.log.losses[-6:]) < 0.99 * sum(found.log.losses[:6])  # the same six batches


def test_zero_shot_takes_no_step() -> None:
    found = adapt(source(), batches(), method="zero-shot", steps=5, progress=False)
    x = batches()[0][0]
    assert found.log.losses == [] and torch.equal(found.module(x), source()(x))


def test_sg_moves_the_projections_and_memflora_does_not() -> None:
    projections = {}
    for name in ("memflora", "memflora-sg"):
        found = adapt(source(), batches(), method=name, sites="all", steps=3, progress=False)
        projections[name] = found.module.get_submodule("3").P.clone()
    start = floorplan.rewrite(source(), batches()[0][0], sites="all", measured=False).module
    p = start.get_submodule("3").P
    assert torch.equal(projections["memflora"], p) and not torch.equal(projections["memflora-sg"], p)


def test_the_best_step_by_validation_is_returned() -> None:
    values = iter([3.0, 1.0, 2.0, 5.0])
    seen: list[dict[str, Tensor]] = []

    def validate(m: nn.Module) -> float:
        assert not m.training and not torch.is_grad_enabled()
        seen.append(weights(m))
        return next(values)

    found = adapt(source(), batches(), sites="all", steps=4, validate=validate, progress=False)
    assert found.log.validation == {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0} and found.log.kept == 2
    assert same(weights(found.module), seen[1])


@pytest.mark.parametrize("name", ["memflora-sg", "lora-c"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"method": name, "sites": "all", "progress": False}
    whole = adapt(source(), batches(), steps=6, **options)
    path = tmp_path / "adapting.pt"
    adapt(source(), batches(), steps=4, checkpoint=path, **options)
    resumed = adapt(source(), batches(), steps=6, checkpoint=path, **options)
    assert resumed.log.losses == whole.log.losses
    assert same(weights(resumed.module), weights(whole.module))
    assert [p.name for p in tmp_path.iterdir()] == ["adapting.pt"]
    path.write_bytes(b"no checkpoint")
    with pytest.raises(FloorplanError, match="adapting.pt: not a checkpoint of this adaptation"):
        adapt(source(), batches(), steps=6, checkpoint=path, **options)


def test_a_loss_that_is_no_number_stops_with_the_step() -> None:
    given = batches(3)
    given[1][0][0] = float("nan")
    with pytest.raises(FloorplanError, match="^adapt: the loss is nan at step 2; lower lr"):
        adapt(source(), given, sites="all", steps=3, progress=False)


def test_a_users_own_loss_and_a_one_shot_iterator() -> None:
    def once() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches(2)

    calls = []

    def own(out: Tensor, y: Tensor) -> Tensor:
        calls.append(len(y))
        return nn.functional.multi_margin_loss(out, y)

    found = adapt(source(), once(), sites="all", steps=5, loss=own, progress=False)
    assert calls == [16] * 5 and len(found.log.losses) == 5


def test_calibration_comes_before_the_fold() -> None:
    given = batches(1)
    model = copy.deepcopy(source())
    found = adapt(model, given, sites="all", steps=0, calibrate="reset", progress=False)
    want = floorplan.calibrate(model, [given[0][0]], "reset").eval()(given[0][0])
    assert torch.allclose(found.module(given[0][0]), want, atol=1e-5)


def test_what_cannot_be_used_is_said() -> None:
    for given, says in (([], "no batch"), ([torch.ones(2, 4, 12)], "a pair")):
        with pytest.raises(FloorplanError, match=says):
            adapt(source(), given, progress=False)  # type: ignore[arg-type]
    with pytest.raises(FloorplanError, match="loss hinge: not known"):
        adapt(source(), batches(), loss="hinge", progress=False)


@pytest.mark.parametrize("other", [{"seed": 7}, {"lr": 1e-2}, {"method": "memflora-noscale"}, {"calibrate": "ema"}])
def test_a_checkpoint_of_another_adaptation_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    options: dict[str, Any] = {"sites": "all", "steps": 2, "checkpoint": tmp_path / "a.pt", "progress": False}
    adapt(source(), batches(), **options)
    with pytest.raises(FloorplanError, match="another model, method, seed or rate"):
        adapt(source(), batches(), **(options | other))


def test_an_adapted_model_goes_on_in_a_copy() -> None:
    first = adapt(source(), batches(), method="memflora-sg", sites="all", steps=2, progress=False).module
    before = weights(first)
    again = adapt(first, batches(), steps=2, progress=False)
    assert same(weights(first), before) and again.module is not first and again.log.method == "memflora-sg"
    for options in ({"method": "lora-c"}, {"calibrate": "ema"}):
        with pytest.raises(FloorplanError, match="adapted by memflora-sg already"):
            adapt(first, batches(), progress=False, **options)  # type: ignore[arg-type]


def test_gradients_that_are_no_numbers_stop_before_the_step(tmp_path: Path) -> None:
    def bad(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y) + torch.sqrt((out * 0).sum())

    with pytest.raises(FloorplanError, match="^adapt: a gradient is not finite at step 1"):
        adapt(source(), batches(), sites="all", loss=bad, checkpoint=tmp_path / "a.pt", progress=False)
    assert not list(tmp_path.iterdir())


def test_endless_batches_are_taken_as_they_come() -> None:
    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from batches(2)

    assert len(adapt(source(), endless(), sites="all", steps=3, progress=False).log.losses) == 3


def test_a_validation_that_is_no_number_is_never_the_best() -> None:
    values = iter([float("nan"), 3.0, 2.0])
    found = adapt(source(), batches(), sites="all", steps=3, validate=lambda m: next(values), progress=False)
    assert found.log.kept == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": -1}, "not negative"),
        ({"every": 0}, "1 or more"),
        ({"chunks": 0}, "1 or more"),
        ({"loss": lambda out, y: out}, "one number"),
        ({"checkpoint": "/no/such/folder/a.pt"}, "folder"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FloorplanError, match=says):
        adapt(source(), batches(), sites="all", progress=False, **options)
