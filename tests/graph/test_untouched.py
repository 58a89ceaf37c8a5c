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


class Constrained(nn.Module):
    """Renews its weights whenever it runs, as spectral and maximum norms by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.c.weight = nn.Parameter(self.b.weight.data[:])  # lies in the same memory

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.01, 0.01)
            torch.mul(self.b.weight, 0.5, out=self.b.weight)
            self.a.bias.data = torch.ones(4)  # type: ignore[union-attr]
        return self.c(self.b(torch.relu(self.a(x))))  # type: ignore[no-any-return]


def test_parameters_that_a_forward_writes_are_put_back() -> None:
    model, x = Constrained(), torch.randn(2, 3, 5, 5)
    before = {k: (v.data_ptr(), v.clone()) for k, v in model.state_dict().items()}
    for call in (lambda: floorplan.check(model, x), lambda: floorplan.measure(model, x)):
        call()
        now = model.state_dict()
        assert all(now[k].data_ptr() == at and torch.equal(now[k], v) for k, (at, v) in before.items())
