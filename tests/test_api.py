"""check, rewrite, save, load as a user calls them."""

from pathlib import Path

import pytest
import torch
from small import Residual, Smooth

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
    a, b, c = (
        floorplan.rewrite(Residual(), X, rank=2, seed=s, measured=False).module for s in (0, 0, 1)
    )
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
