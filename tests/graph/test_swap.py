"""One module for another at all its calls, unless somebody reads what it overwrites."""

import torch
from hard_nets import Lambda
from torch import Tensor, fx, nn

from floorplan.graph.driver import Site
from floorplan.graph.edit import swap


def run(model: nn.Module) -> tuple[fx.GraphModule, list[Site]]:
    """ReLU becomes Tanh, but for those that are called `kept`."""
    gm = fx.symbolic_trace(model)
    refusal = {id(m): f"{n} stays" for n, m in gm.named_modules() if n == "kept"}
    sites = list(swap(gm, lambda m: refusal.get(id(m)) or nn.Tanh() if isinstance(m, nn.ReLU) else None))
    return gm, sites


def test_a_module_is_swapped_once_at_all_its_calls() -> None:
    gm, sites = run(Lambda(lambda m, x: m.kept(m.a(m.b(m.a(x)))), a=nn.ReLU(), b=nn.Sigmoid(), kept=nn.ReLU()))
    assert sites == [Site("a"), Site("a_1"), Site("kept", "kept stays")]
    kinds = [type(gm.get_submodule(n)).__name__ for n in ("a", "b", "kept")]
    assert kinds == ["Tanh", "Sigmoid", "ReLU"]
    x = torch.randn(5)
    assert torch.equal(gm(x), x.tanh().sigmoid().tanh().relu())


def test_who_overwrites_what_is_read_later_stays() -> None:
    def later(m: Lambda, x: Tensor) -> Tensor:
        y = x * 2
        return m.act(y) + y  # type: ignore[no-any-return]

    def earlier(m: Lambda, x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        return m.act(y) + z  # type: ignore[no-any-return]

    why = "add reads what act writes in place; set inplace=False"
    assert run(Lambda(later, act=nn.ReLU(True)))[1] == [Site("act", why)]
    assert run(Lambda(earlier, act=nn.ReLU(True)))[1] == [Site("act")]
    assert run(Lambda(later, act=nn.ReLU()))[1] == [Site("act")]
