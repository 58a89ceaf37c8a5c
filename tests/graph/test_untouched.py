"""What tracing changes is put back: containers, caches, globals."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import floorplan
from floorplan.graph.untouched import no_memory, same_containers, untouched

SEEN: list[Any] = []


@lru_cache
def ramp(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


class Forgetful(nn.Module):
    """Leaves something in a list of its own, in a nested dict, in a global and in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.maps: list[Any] = []
        self.store: dict[str, Any] = {"inner": [0]}

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.maps.append(y)
        self.store["inner"][0] = y
        SEEN.append(y)
        return y * ramp(8)  # type: ignore[no-any-return]


def test_tracing_leaves_nothing_behind() -> None:
    model, x = Forgetful(), torch.randn(2, 3, 8, 8)
    floorplan.check(model, x, measured=False)
    assert model.maps == [] and model.store == {"inner": [0]} and SEEN == []
    assert model(x).shape == (2, 4, 8, 8) and type(ramp(8)) is Tensor
    SEEN.clear()


def test_containers_are_the_same_objects() -> None:
    model = Forgetful()
    maps, inner = model.maps, model.store["inner"]
    with same_containers(model):
        model.maps.append(1)
        model.store["inner"].append(2)
        model.store["new"] = 3
    assert model.maps is maps and maps == [] and model.store == {"inner": [0]}
    assert model.store["inner"] is inner


def test_what_the_forward_wrote_is_told() -> None:
    model = Forgetful()
    with untouched(model) as changed:
        model.maps.append(1)
        model.fresh = 2
    assert not hasattr(model, "fresh")
    assert any("container" in c for c in changed) and any("fresh" in c for c in changed)


def test_a_cache_that_was_filled_before_is_emptied_only_of_traces() -> None:
    with no_memory(Forgetful()):
        ramp(3)
    assert ramp.cache_info().currsize == 0
