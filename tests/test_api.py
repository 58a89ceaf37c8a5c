"""check, rewrite, save, load as a user calls them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import Residual, Smooth
from torch import nn

import floorplan
from floorplan.errors import FloorplanError

X = torch.randn(4, 3, 16, 16)
# q of three convs (stem 16x16, conv and proj 8x8), gates of both activations, 4-bit pool offsets.
Q = 4 * 4 * 2 * (16 * 16 + 8 * 8 + 8 * 8)
GATES = 4 * (8 * 16 * 16 + 16 * 8 * 8) // 8
POOL = 4 * 8 * 8 * 8 * 4 // 8
DROPOUT = 4 * 16 // 8


def test_check_as_it_stands_is_above_the_floor_and_exact() -> None:
    report = floorplan.check(Residual(), X, measured=True)
    assert report.verdict == "ABOVE_FLOOR" and report.exit_code == 1
    assert report.difference is not None and not any(report.difference.values())
    assert {"activation", "normalization", "convolution", "pooling"} <= set(report.pillars)


def test_check_with_rank_judges_the_rewritten_model_and_leaves_the_source_alone() -> None:
    model = Residual()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    report = floorplan.check(model, X, rank=2, sites="all")
    assert report.verdict == "AT_FLOOR" and report.exit_code == 0
    assert report.predicted.saved == Q + GATES + POOL + DROPOUT
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags


def test_rewrite_starts_as_the_source_and_trains() -> None:
    model = Residual().eval()
    result = floorplan.rewrite(model, X, rank=2, sites="all")
    for report in (result.report.before, result.report.after):
        assert report.difference is not None and not any(report.difference.values())
    adapted = result.module
    assert torch.allclose(adapted.eval()(X), model(X), rtol=1e-5, atol=1e-6)
    names = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert names == {"stem.U", "conv.U", "proj.U"}
    adapted.train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(8):
        torch.manual_seed(0)
        loss = torch.nn.functional.cross_entropy(adapted(X), torch.tensor([0, 1, 2, 3]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_train_mode_never_unfreezes_a_folded_batchnorm() -> None:
    adapted = floorplan.rewrite(Residual(), X, rank=2).module
    adapted.drop = torch.nn.Identity() if hasattr(adapted, "drop") else None
    state = {k: v.clone() for k, v in adapted.state_dict().items()}
    adapted.train()(X)
    assert all(torch.equal(v, state[k]) for k, v in adapted.state_dict().items())


def test_save_and_load_give_a_trainable_module_back(tmp_path: Path) -> None:
    result = floorplan.rewrite(Residual(), X, rank=2, sites="all", measured=False)
    path = tmp_path / "adapted.pt"
    floorplan.save(result.module, path)
    back = floorplan.load(path)
    assert torch.equal(back.eval()(X), result.module.eval()(X))
    report = floorplan.check(str(path), X, rank=2)
    assert report.verdict == "AT_FLOOR" and report.subject == "as-is"
    with pytest.raises(FloorplanError, match="exists"):
        floorplan.save(result.module, path)
    with pytest.raises(FloorplanError, match="rank 2, not 3"):
        floorplan.check(str(path), X, rank=3)
    with pytest.raises(FloorplanError, match="already adapted"):
        floorplan.rewrite(str(path), X)


def test_seed_and_rank_set_the_adapter() -> None:
    a, b, c = (floorplan.rewrite(Residual(), X, rank=2, seed=s, measured=False).module for s in (0, 0, 1))
    p = [m.get_submodule("conv").P for m in (a, b, c)]
    assert torch.equal(p[0], p[1]) and not torch.equal(p[0], p[2])
    with pytest.raises(FloorplanError, match="no conv was adapted"):
        floorplan.rewrite(Residual(), X, rank=64)


def test_train_head_keeps_the_last_linear_trainable_and_says_what_it_costs() -> None:
    report = floorplan.check(Residual(), X, rank=2, train_head=True)
    assert report.verdict == "ABOVE_FLOOR"
    assert [e.op for e in report.proof.guilty] == ["Linear"]
    assert "train-head" in report.proof.guilty[0].fix


def test_what_cannot_be_gated_is_left_and_named() -> None:
    result = floorplan.rewrite(Smooth(), torch.randn(2, 3, 9, 9), rank=2)
    after = result.report.after
    assert after.verdict == "ABOVE_FLOOR"
    assert [e.op for e in after.proof.guilty] == ["SiLU"]
    assert any(s.node == "act" for _, s in after.refused)
    assert after.difference is not None and not any(after.difference.values())


def test_an_input_size_is_inferred_and_said() -> None:
    report = floorplan.check(Residual(), batch=3)
    assert report.inputs == ((3, 3, 224, 224),)
    assert any("inferred" in n for n in report.notes)


def test_a_model_with_no_guessable_input_says_what_to_give() -> None:
    class Odd(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

    with pytest.raises(FloorplanError, match="--input"):
        floorplan.check(Odd())


def test_the_numbers_of_the_two_backbones() -> None:
    mobile = floorplan.check("examples/backbones.py:mobilenet_v2", rank=2, batch=64)
    assert mobile.verdict == "AT_FLOOR"
    assert mobile.predicted.saved == 64 * 130_022 == 8_321_408
    assert mobile.predicted.trainable_parameters == 19_776
    assert mobile.predicted.requested_peak <= 84_000_000
    temporal = floorplan.check("examples/backbones.py:t_resnet", rank=2, batch=64)
    assert temporal.verdict == "AT_FLOOR"
    assert temporal.predicted.saved == 64 * 12_480
    assert temporal.predicted.trainable_parameters == 10_624


def test_the_mode_of_the_model_is_put_back() -> None:
    model = Residual().train()
    model.bn.eval()
    eval_report = floorplan.check(model, X, mode="eval")
    assert model.training and not model.bn.training and model.bn1.training
    assert eval_report.predicted.saved < floorplan.check(model, X, mode="train").predicted.saved
    with pytest.raises(FloorplanError, match="mode half"):
        floorplan.check(model, X, mode="half")


def test_what_is_no_model_is_said_in_one_line() -> None:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)))
    for wrong in (Residual, 3, scripted):
        with pytest.raises(FloorplanError, match="^model: ") as caught:
            floorplan.check(wrong, X)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


class Branching(nn.Module):
    """Decides by what tracing cannot show it: the type of a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        if self.kind == "isinstance" and isinstance(y, torch.Tensor):
            y = y * 2
        if self.kind == "saves" and isinstance(y, torch.Tensor):
            y = torch.sigmoid(y)
        if self.kind == "hasattr":
            y = y * (2 if hasattr(y, "nope") else 3)
        if self.kind == "try":
            try:
                y = y * 2 if y.mean() > -1 else y
            except Exception:
                pass
        return self.b(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "says"),
    [("isinstance", "adapted against source"), ("saves", "takes another branch"), ("try", "branches on tensor values")],
)
def test_a_graph_that_is_not_the_model_is_refused(kind: str, says: str) -> None:
    with pytest.raises(FloorplanError, match=says):
        floorplan.rewrite(Branching(kind), torch.randn(2, 3, 8, 8))
    if kind == "saves":
        with pytest.raises(FloorplanError, match=says):
            floorplan.check(Branching(kind), torch.randn(2, 3, 8, 8), rank=2)


def test_hasattr_is_answered_for_the_tensor() -> None:
    model, x = Branching("hasattr"), torch.randn(2, 3, 8, 8)
    result = floorplan.rewrite(model, x, measured=False)
    assert torch.allclose(result.module.eval()(x), model.eval()(x), atol=1e-5)


class Caching(nn.Module):
    """Keeps a grid in a list, as detection heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.grid: list[Any] = [None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.grid[0] is None:
            self.grid[0] = torch.zeros_like(y[:1, :1])
        return self.b(y + self.grid[0])  # type: ignore[no-any-return]


def test_containers_of_the_model_are_put_back() -> None:
    model, x = Caching(), torch.randn(2, 3, 8, 8)
    floorplan.check(model, x)
    assert model.grid == [None]
    result = floorplan.rewrite(model, x)
    assert model.grid == [None] and result.module.eval()(x).shape == (2, 4, 8, 8)


def test_spectral_norm_vectors_of_the_source_stay() -> None:
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
    model = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(8, 4, 1)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    floorplan.rewrite(model, torch.randn(2, 3, 8, 8), measured=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_odd_inputs_survive_a_file(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, d: dict[str, torch.Tensor], k: int = 1) -> torch.Tensor:
            return self.b(torch.relu(self.a(d["x"]))) * k  # type: ignore[no-any-return]

    given = ({"x": torch.randn(2, 3, 8, 8)}, 3)
    result = floorplan.rewrite(Named(), given, measured=False)
    floorplan.save(result.module, tmp_path / "a.pt")
    assert torch.equal(floorplan.load(tmp_path / "a.pt").eval()(*given), result.module.eval()(*given))


def test_a_first_axis_that_is_no_free_batch() -> None:
    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x))).mean((2, 3)).view(-1, 5, 4).mean(1)

    result = floorplan.rewrite(Crops(), torch.randn(10, 3, 8, 8))
    assert not any((result.report.after.difference or {}).values())


def test_flattened_maps_of_a_pinned_size_are_not_at_the_floor() -> None:
    class Pinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
            self.register_buffer("place", torch.randn(1, 1, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x) + self.place
            return self.b(y) + torch.tanh(y.mean(0).flatten()).sum()  # type: ignore[no-any-return]

    report = floorplan.check(Pinned(), torch.randn(2, 3, 16, 16), rank=2)
    assert report.verdict in ("UNPROVEN", "ABOVE_FLOOR")


@pytest.mark.parametrize("rank", [0, -1, True])
def test_ranks_that_are_none(rank: int) -> None:
    with pytest.raises(FloorplanError, match="whole rank of 1 or more"):
        floorplan.check(Branching("none"), torch.randn(2, 3, 8, 8), rank=rank)


def test_an_unread_sigmoid_keeps_nothing() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            torch.sigmoid(y)
            return self.b(y)  # type: ignore[no-any-return]

    result = floorplan.rewrite(Unread(), torch.randn(2, 3, 16, 16))
    after = result.report.after
    assert after.verdict == "AT_FLOOR" and after.predicted.saved == after.predicted.saved_census
