"""Measured figures: what they count, and that measuring leaves the model as it was."""

import copy

import pytest
import torch
from hard_models import build
from hard_nets import Lambda, block2, pair, same
from kinds import images
from torch import nn

from floorplan.ledger.figures import Figures, measure


def test_figures_of_one_conv_by_hand() -> None:
    model, x = Lambda(lambda m, x: m.c1(x), c1=same(3, 8)), images()
    weight, bias, out = 4 * 8 * 27, 4 * 8, 4 * 4 * 8 * 144
    found = measure(model, (x,))
    state = weight + bias
    assert found.saved == found.saved_census == 0
    assert found.saved_refcount == x.numel() * 4
    assert found.training_state_peak == 3 * state + state  # parameters, two moments, gradients
    assert found.requested_peak >= out + state
    assert found.total == found.requested_peak + 3 * state + x.numel() * 4
    assert found.trainable_parameters == 224


def test_the_model_is_left_as_it_was() -> None:
    model, x = Lambda(block2, **pair(8)), images()
    model(x).sum().backward()
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad for p in model.parameters()]
    rng = torch.get_rng_state()
    measure(model, (x,))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_twice_the_same() -> None:
    model, inputs = build("channel-dropout")
    assert measure(model, inputs) == measure(model, inputs)


def test_autocast_counts_16_bit_copies() -> None:
    model, inputs = build("autocast")
    assert measure(model, inputs, autocast=torch.bfloat16).saved == 40032


def test_as_dict_has_every_figure() -> None:
    figures = Figures(1, 2, 3, 4, 5, 6, 7)
    assert list(figures.as_dict().values()) == [1, 2, 3, 4, 5, 6, 7]


def test_a_failing_model_fails_alike_and_is_restored() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(4, 8, 3))
    before = model[0].running_mean.clone()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="channels"):
        measure(model, (images(),))
    assert torch.equal(model[0].running_mean, before)  # type: ignore[arg-type]
