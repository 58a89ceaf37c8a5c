"""What an op makes lies in memory as its fake says, op by op, in steps of random networks and of losses.

A copy that a layout makes necessary, or spares, is memory.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, seed, settings
from random_cnns import networks
from random_examples import PROFILE, trains
from random_layers import Spec, batch, network
from torch import Tensor

from floorplan.ledger.kernels import as_really_run
from floorplan.torch_doors import FakeTensorMode, TorchDispatchMode, schema_of, tensors_in, tree_map, wants_values

last = torch.channels_last


def lies(out: Any) -> list[tuple[Any, ...]]:
    """How tensors lie; the stride of a size of 1 means nothing."""
    return [
        (t.dtype, tuple(t.shape), tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1))
        for t in tensors_in(out)
    ]


class Beside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every op on fakes of its arguments too, which lie as these do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes, self.unlike, self.ops = FakeTensorMode(allow_non_fake_inputs=True), list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self.fakes:
            made: dict[int, Any] = {}

            def fake(t: Any) -> Any:
                if not isinstance(t, Tensor):
                    return t
                return made.setdefault(id(t), self.fakes.from_tensor(t, static_shapes=True))

            given, named = tree_map(fake, (args, kwargs))
        out = func(*args, **kwargs)
        self.ops += 1
        with self.fakes:
            try:
                said = lies(as_really_run(func, given, named))
            except Exception as e:
                assert wants_values(e), func
                return out
        asked = out
        if schema_of(func).arguments[-1:] and schema_of(func).arguments[-1].name == "output_mask":
            asked = [t for t, wanted in zip(out, args[-1], strict=True) if wanted]
        if said != lies(asked):
            of = [tuple(t.stride()) for t in tensors_in(args)]
            self.unlike.append(f"{schema_of(func).name} of strides {of}: {said} instead of {lies(asked)}")
        return out


def weighed(out: Any, target: Tensor) -> Tensor:
    """All outputs times themselves turned round: gradients come in other orders than the maps."""
    return torch.stack([(t * t.detach().flip(-1)).sum() for t in tensors_in(out) if t.dim()]).sum()


def unlike(model: Any, x: Tensor, loss: Callable[[Any], Tensor]) -> list[str]:
    with Beside() as seen:
        total = loss(model(x.requires_grad_()))
        total.backward()  # type: ignore[no-untyped-call]
    assert seen.ops > 3
    return seen.unlike


@pytest.mark.parametrize("shard", range(2))
def test_layouts_of_random_networks(shard: int) -> None:
    @seed(shard)
    @settings(PROFILE, max_examples=16)
    @given(networks())
    def check(spec: Spec) -> None:
        assume(trains(spec))
        assert not unlike(network(spec), batch(spec), lambda out: weighed(out, out))

    check()


NAMES = ["cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"]
NAMES += ["binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss", "gaussian_nll_loss"]


@pytest.mark.parametrize("mapped", [False, True], ids=["map contiguous", "map channels_last"])
@pytest.mark.parametrize("aimed", [False, True], ids=["target contiguous", "target channels_last"])
@pytest.mark.parametrize("name", NAMES)
def test_layouts_of_losses(name: str, mapped: bool, aimed: bool) -> None:
    x, y = torch.randn(3, 4, 5, 6), torch.rand(3, 5, 5, 6) + 0.1
    x, y = x.to(memory_format=last) if mapped else x, y.to(memory_format=last) if aimed else y
    more = (y.square(),) if name == "gaussian_nll_loss" else ()
    for reduction in ("mean", "sum", "none"):
        model = torch.nn.Sequential(torch.nn.Conv2d(4, 5, 1), torch.nn.Tanh())

        def loss(out: Tensor, how: str = reduction) -> Any:
            return (getattr(F, name)(out, y, *more, reduction=how) * 2).sum()

        assert not unlike(model, x, loss)
