"""What the rewritten graph leaves as it was, and what it computes for whom."""

import torch
from smooth_nets import INPUT, adapted_net
from torch import Tensor, fx, nn

from floorplan.budget.remat.graph import apply
from floorplan.budget.remat.study import out_of_place
from floorplan.layers.promises import Forgetful, Promise


class Twice(nn.Module):
    """Two activations of one conv's result; the second reads it through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return nn.functional.silu(z).sum() + torch.sin(z.flatten(1)).sum()


def count(gm: fx.GraphModule, kind: type[nn.Module]) -> int:
    calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    return sum(isinstance(gm.get_submodule(str(n.target)), kind) for n in calls)


def test_shared_and_apart() -> None:
    gm, x = fx.symbolic_trace(Twice()), torch.randn(2, 3, 4, 4)
    plain, values = out_of_place(gm, (x.requires_grad_(),))
    once, macs = apply(plain, values, {"conv"})
    apart, more = apply(plain, values, {"conv"}, apart=True)
    assert (count(once, Promise), count(apart, Promise)) == (1, 2)
    assert count(once, Forgetful) == count(apart, Forgetful) == 2
    assert more == 2 * macs == 2 * (2 * 16 * 3 * 8)
    want = torch.autograd.grad(gm(x), x)[0]
    for twin in (once, apart):
        assert torch.equal(torch.autograd.grad(twin(x), x)[0], want)
        assert list(twin.state_dict()) == list(gm.state_dict())


def test_names_keys_and_parameters_survive() -> None:
    gm = adapted_net("efficient")
    plain, values = out_of_place(gm, (torch.randn(INPUT),))
    saved = {o for v in values.values() for o in v.saves}
    again = {n for n in saved if n and not values[n].refused and values[n].macs == 0 and values[n].nbytes}
    twin, macs = apply(plain, values, again)
    assert macs == 0 and again
    assert list(twin.state_dict()) == list(gm.state_dict())
    assert [id(p) for p in twin.parameters()] == [id(p) for p in gm.parameters()]
    assert {n.name for n in gm.graph.nodes} <= {n.name for n in twin.graph.nodes}
    assert twin.meta == gm.meta
