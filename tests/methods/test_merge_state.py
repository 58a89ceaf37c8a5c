"""What training changed goes into the source's own state_dict, or is refused."""

from typing import Any

import pytest
import torch
from graphs import randomize
from hard_nets import Conv
from merges import X, adapted, check, into_source
from small import Residual
from torch import nn

from floorplan.errors import FloorplanError
from floorplan.methods.merge_state import delta_state


def test_what_trained_outside_the_sites_goes_into_the_state_dict() -> None:
    model = randomize(Residual()).double()
    gm = adapted(model, X.double(), method="lora-conv")
    head: Any = gm.get_submodule("fc")
    with torch.no_grad():
        head.weight.add_(1.0)
    gm.train()(X.double())  # the BatchNorms gather statistics
    assert into_source(model, gm.eval(), X) <= 1e-12
    head.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(FloorplanError, match="fc.extra trains, but the source has no such tensor"):
        delta_state(gm, model)


def test_adapters_of_convs_that_share_a_weight_do_not_fit_one_state_dict() -> None:
    model = nn.Sequential(Conv(4, 4, 1), Conv(4, 4, 1))
    model[1].weight = model[0].weight
    x = torch.randn(2, 4, 5, 5)
    gm = check(model, x)[0]
    with pytest.raises(FloorplanError, match="0 and 1 share one weight"):
        delta_state(gm, model)


def test_a_source_of_other_shapes_is_refused() -> None:
    gm = adapted(Residual(), X)
    with pytest.raises(FloorplanError, match="the source has no stem.weight of shape"):
        delta_state(gm, Residual(16))
