"""AdaBN: statistics of the target, by both rules, on every BatchNorm."""

import pytest
import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.methods.calibrate import calibrate


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.Flatten()
    )
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return model


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)


def test_ema_moves_by_the_momentum_and_normalises_by_the_old_statistics() -> None:
    model, x = net().eval(), torch.randn(8, 3, 6, 6) * 3 + 1
    twin = calibrate(model, [x])
    mean, var = moments(x)
    assert torch.allclose(twin[0].running_mean, 0.9 * model[0].running_mean + 0.1 * mean, atol=1e-6)
    assert torch.allclose(twin[0].running_var, 0.9 * model[0].running_var + 0.1 * var, atol=1e-5)
    mean, var = moments(model[1](model[0](x)))
    assert torch.allclose(twin[2].running_mean, 0.7 * model[2].running_mean + 0.3 * mean, atol=1e-6)


def test_reset_is_the_mean_over_the_batches_each_layer_seeing_the_batch() -> None:
    model = net().eval()
    batches = [torch.randn(8, 3, 6, 6) * s for s in (1.0, 2.0)]
    twin = calibrate(model, [(b,) for b in batches], "reset")
    means, variances = zip(*(moments(b) for b in batches), strict=True)
    assert torch.allclose(twin[0].running_mean, torch.stack(means).mean(0), atol=1e-6)
    assert torch.allclose(twin[0].running_var, torch.stack(variances).mean(0), atol=1e-5)
    inner = [
        moments(model[1](nn.functional.batch_norm(b, None, None, model[0].weight, model[0].bias, True)))[0]
        for b in batches
    ]
    assert torch.allclose(twin[2].running_mean, torch.stack(inner).mean(0), atol=1e-5)


@pytest.mark.parametrize("how", ["ema", "reset"])
def test_the_model_its_mode_and_its_momentum_stay(how: str) -> None:
    model = net().train()
    model[0].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    twin = calibrate(model, [torch.randn(4, 3, 6, 6)], how)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]
    assert (twin[0].momentum, twin[2].momentum) == (0.1, 0.3)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())


def test_what_cannot_be_calibrated_is_said() -> None:
    with pytest.raises(FloorplanError, match="no BatchNorm"):
        calibrate(nn.Conv2d(3, 3, 1), [torch.ones(1, 3, 2, 2)])
    with pytest.raises(FloorplanError, match="no batch"):
        calibrate(net(), [])
    with pytest.raises(FloorplanError, match="^calibrate twice: not known; use ema, reset$"):
        calibrate(net(), [], "twice")


def test_statistics_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(FloorplanError, match="running_mean is no longer finite"):
        calibrate(net(), [torch.full((4, 3, 6, 6), float("nan"))])
