"""The driver: order, copies, lint, leftovers, and errors that name the passes already run."""

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from floorplan.errors import FloorplanError, PassError
from floorplan.graph.driver import Pass, Site, rewrite


def net() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))


def accept(p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """No check."""


def drop_relu(gm: fx.GraphModule) -> Iterator[Site]:
    for n in list(gm.graph.nodes):
        if n.op == "call_module" and isinstance(gm.get_submodule(n.target), nn.ReLU):
            n.replace_all_uses_with(n.args[0])
            gm.graph.erase_node(n)
            yield Site(n.name)


def look(gm: fx.GraphModule) -> Iterator[Site]:
    yield Site("_0", "not today")


def leave_dangling(gm: fx.GraphModule) -> Iterator[Site]:
    other = fx.Graph().placeholder("stranger")
    next(n for n in gm.graph.nodes if n.op == "output").args = (other,)
    yield Site("output")


def crash(gm: fx.GraphModule) -> Iterator[Site]:
    yield Site("_0")
    raise KeyError("weights")


def complain(gm: fx.GraphModule) -> Iterator[Site]:
    raise FloorplanError("--rank 0: an adapter has a rank of 1 or more")
    yield


DROP, LOOK = Pass("drop-relu", drop_relu), Pass("look", look)


def test_log_in_order_and_source_untouched() -> None:
    gm = net()
    text = str(gm.graph)
    after, log = rewrite(gm, [LOOK, DROP], accept)
    assert log == {"look": [Site("_0", "not today")], "drop-relu": [Site("_1")]}
    assert list(log) == ["look", "drop-relu"]
    assert str(gm.graph) == text and isinstance(gm.get_submodule("1"), nn.ReLU)
    assert [n.name for n in after.graph.nodes] == ["input_1", "_0", "_2", "output"]
    assert "relu" not in after.code and [n for n, _ in after.named_children()] == ["0", "2"]
    assert after.get_submodule("0").weight is not gm.get_submodule("0").weight


def test_no_passes_is_the_graph_itself() -> None:
    gm = net()
    assert rewrite(gm, [], accept) == (gm, {})


def test_check_sees_both_graphs_recompiled() -> None:
    seen = []

    def check(p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        x = torch.linspace(-9, 9, 48).view(16, 3)
        seen.append((p.name, torch.equal(before(x), after(x))))

    rewrite(net(), [LOOK, DROP], check)
    assert seen == [("drop-relu", False)]  # nothing was rewritten by the other


def test_check_failure_names_what_had_run() -> None:
    def check(p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        if p is DROP:
            raise ValueError("output 0 differs")

    with pytest.raises(PassError, match=r"^drop-relu: output 0 differs \(passes already run: look\)$"):
        rewrite(net(), [LOOK, DROP], check)
    with pytest.raises(PassError, match=r"\(passes already run: none\)$"):
        rewrite(net(), [DROP], check)


def test_crash_and_broken_graph_are_pass_errors() -> None:
    with pytest.raises(PassError, match="^crash: 'weights'") as caught:
        rewrite(net(), [Pass("crash", crash)], accept)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PassError, match="^dangling: .*stranger"):
        rewrite(net(), [Pass("dangling", leave_dangling)], accept)


def test_a_users_error_is_passed_on_as_it_is() -> None:
    with pytest.raises(FloorplanError, match="^--rank 0") as caught:
        rewrite(net(), [Pass("complain", complain)], accept)
    assert not isinstance(caught.value, PassError)


def test_unused_reads_go_and_in_place_calls_stay() -> None:
    gm = net()
    gm.register_buffer("table", torch.ones(3))
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(first):
        gm.graph.call_method("add_", (first, 1))
        gm.graph.get_attr("table")
    gm.recompile()
    after, _ = rewrite(gm, [LOOK], accept)
    ops = [n.op for n in after.graph.nodes]
    assert "get_attr" not in ops and "call_method" in ops
    x = torch.zeros(1, 3)
    after(x)
    assert torch.equal(x, torch.ones(1, 3))
