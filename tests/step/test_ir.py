"""Straight-line code: what may be overwritten, and when names go."""

import builtins
import copy
import importlib.util
import keyword
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import by_autograd, check, gradients, graph_of, weighted, weights_for, worst
from torch import fx

from floorplan.step import ops, program, rules, runtime, studied
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.ir import Function, Instr, Names, last_uses, statements, text


def act(out: str, x: str) -> Instr:
    return Instr(out, (out,), "act({0})", (x,), inplace="act_({0})")


def lines(f: Function) -> list[str]:
    return [line for _, line in statements(f)]


def test_a_dead_buffer_is_overwritten_and_every_name_goes_at_its_last_use() -> None:
    body = [Instr("a", ("a",), "conv({0})", ("x",)), act("b", "a"), Instr("c", ("c",), "conv({0})", ("b",))]
    got = lines(Function("f", ("x",), body, ("c",)))
    assert got == ["a = conv(x)", "del x", "b = act_(a)", "del a", "c = conv(b)", "del b"]


def test_a_value_read_later_is_not_overwritten() -> None:
    body = [act("b", "x"), Instr("c", ("c",), "{0} + {1}", ("x", "b"))]
    assert lines(Function("f", ("x",), body, ("c",)))[0] == "b = act(x)"


def test_an_alias_that_is_read_later_protects_the_buffer() -> None:
    view = Instr("v", ("v",), "{0}.flatten(1)", ("x",), shares=("x",))
    body = [view, act("b", "x"), Instr("c", ("c",), "{0} + {1}", ("v", "b"))]
    assert "b = act(x)" in lines(Function("f", ("x",), body, ("c",)))


def test_what_is_kept_is_not_overwritten() -> None:
    assert lines(Function("f", ("x",), [act("b", "x")], ("b", "x")))[0] == "b = act(x)"


def test_the_callers_tensors_are_not_overwritten() -> None:
    assert lines(Function("f", ("x",), [act("b", "x")], ("b",), owned=False))[0] == "b = act(x)"
    assert lines(Function("f", ("x",), [act("b", "x")], ("b",), owned=True))[0] == "b = act_(x)"


def test_what_a_region_may_have_saved_is_not_overwritten() -> None:
    region = Instr("r", ("y", "t"), "region.forward({0})", ("x",), shares=("x",), fresh=False)
    assert "b = act(y)" in lines(Function("f", ("x",), [region, act("b", "y")], ("b", "t")))


def test_an_argument_that_is_read_twice_is_not_overwritten() -> None:
    add = Instr("s", ("s",), "total({0}, {1})", ("x", "x"), inplace="total_({0}, {1})", commutes=True)
    assert lines(Function("f", ("x",), [add], ("s",)))[0] == "s = total(x, x)"


def test_a_sum_takes_whichever_buffer_is_free() -> None:
    add = Instr("s", ("s",), "total({0}, {1})", ("x", "y"), inplace="total_({0}, {1})", commutes=True)
    assert lines(Function("f", ("x", "y"), [add], ("s", "x")))[0] == "s = total_(y, x)"
    assert lines(Function("f", ("x", "y"), [add], ("s", "x", "y")))[0] == "s = total(x, y)"


def test_unread_values_go_at_once() -> None:
    body = [Instr("a", ("a", "b"), "pair({0})", ("x",))]
    assert last_uses(Function("f", ("x",), body, ("a",))) == [{"x", "b"}]
    assert lines(Function("f", ("x", "u"), body, ("a",)))[0] == "del u"


def test_text_empties_its_box_and_tells_nodes_when_marked() -> None:
    f = Function("forward_0", ("x",), [act("b", "x")], ("b",), comments={"b": "b ReLU"})
    assert text(f) == [
        "def forward_0(box):",
        "    x, = box",
        "    box.clear()",
        "    # b ReLU",
        "    b = act_(x)",
        "    del x",
        "    return (b,)",
    ]
    assert "    at('b', 'forward')" in text(f, "forward")


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
FIXED = """torch LAYOUT MICRO_BATCH SIZES build make_step model get anchor box at head head_nodes loss mean stages print
    region_0 region_0_nodes region_1 region_2 forward_0 backward_0 s0 s1 s2 s10 device inf nan NoneType tuple""".split()
PREFIXES = [f"{p}{stem}" for p in "b_ g_ k_ n_ q_ r_ t_ z_".split() for stem in ("conv", "proj", "conv_2", "region_0")]
STEMS = ["conv", "proj", "conv_2", "conv_1", "g_conv_2", "g_conv_3", "q_q_conv"]
ODD = ["", "a b", "0", "1x", "x.y", "x-y", "x_y", "é", "ﬁ", "fi", "__debug__", "_", "{0}", "'", "# \n"]
NAMES = sorted({*keyword.kwlist, *keyword.softkwlist, *runtime.__all__, *FIXED, *PREFIXES, *STEMS, *ODD})
SCHEDULES = [
    Schedule(),
    Schedule(branches=()),
    Schedule(micro_batch=2, layout="contiguous"),
    Schedule(stream=2, layout="channels_last"),
]


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    return graph_of(hostile.Named().double().eval(), X).eval()


def renamed(gm: fx.GraphModule, names: list[str]) -> fx.GraphModule:
    """A copy whose nodes have these names; what it computes stays."""
    twin = copy.deepcopy(gm)
    twin.meta = gm.meta
    for n, name in zip(twin.graph.nodes, names, strict=False):
        if n.op != "output":
            n.name = name
    return twin


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_gradients_whatever_the_nodes_are_called(graph: fx.GraphModule, data: st.DataObject) -> None:
    size = len(graph.graph.nodes)
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=size, max_size=size, unique=True))
    gm, schedule = renamed(graph, names), data.draw(st.sampled_from(SCHEDULES))
    check(gm, (X,), schedule)


@pytest.mark.parametrize("first", range(0, len(NAMES), 10))
def test_gradients_under_every_name(graph: fx.GraphModule, first: int) -> None:
    size = len(graph.graph.nodes)
    check(renamed(graph, (NAMES[first:] + NAMES)[:size]), (X,), SCHEDULES[first // 10 % len(SCHEDULES)])


def test_gradients_of_stages_under_names_of_each_other(graph: fx.GraphModule) -> None:
    gm = renamed(graph, ["conv", "g_conv", "g_g_conv", "r_conv", "q_conv", "conv_2", "g_conv_2", "n_conv", "b_conv"])
    possible = studied.studied(gm, (X,)).crossings
    for cut in list(possible)[:4]:
        check(gm, (X,), Schedule(stages=((cut, 1),), last=2))


LAYERS = [
    ("bottleneck", "gate_", "weight", "rows", "total", "total_", "s0", "s1", "conv_site", "head"),
    ("proj", "b_proj", "n_proj", "q_proj", "z_proj", "g_proj", "r_proj", "k_proj", "t_region_0", "region_0"),
    ("get", "model", "torch", "anchor", "box", "at", "build", "make_step", "self", "Region"),
    ("print", "tuple", "pytree", "fx_pytree", "getattr", "slice", "inf", "device", "nan", "NoneType"),
    ("match", "kind", "_", "case", "LAYOUT", "SIZES", "forward_0", "backward_0", "head_nodes", "accumulate"),
]


@pytest.mark.parametrize("names", LAYERS, ids=lambda names: names[0])
def test_layers_called_like_the_steps_own_names(names: tuple[str, ...], tmp_path: Path) -> None:
    gm = graph_of(hostile.Named(names).double().eval(), X).eval()
    for schedule in SCHEDULES:
        step = check(gm, (X,), schedule)
    step.save(tmp_path / "step.py")
    spec = importlib.util.spec_from_file_location("written_step", tmp_path / "step.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = weights_for(gm, (X,))
    _, want = by_autograd(gm, (X,), target)
    module.make_step(gm, weighted, mean=False)((X,), target)
    assert worst(gradients(gm), want) <= 1e-12
    imports = [line for line in step.source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["import torch", "from floorplan.step.runtime import *"]


def test_functions_of_regions_called_like_helpers_and_like_each_other(graph: fx.GraphModule) -> None:
    gm = copy.deepcopy(graph)
    gm.meta = graph.meta
    at = next(n for n in gm.graph.nodes if n.name == "pool")
    for target, args in (
        (hostile.get, 1),
        (hostile.bottleneck, 1),
        (hostile.total, 1),
        (ops.total, 2),
        (hostile.get, 1),
    ):
        with gm.graph.inserting_after(at):
            new = gm.graph.call_function(target, (at,) * args)
        at.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        at = new
    gm.recompile()
    source = check(gm, (X,), Schedule()).source
    imports = dict(line.split(" as ") for line in source.splitlines() if " as " in line and line.startswith("from "))
    paths = [f"from hostile import {f}" for f in ("get", "bottleneck", "total")]
    assert set(imports) == {*paths, "from floorplan.step.ops import total"}
    assert len({*imports.values(), "get", "bottleneck", "total"}) == 7, "no two share a name, nor take a helper's"
    again = compile_step(gm, "sum", (X,))
    assert again.source == again.source


def test_names_are_drawn_once_and_are_good() -> None:
    names = Names(NAMES)
    roles = [names.of(role, n) for role in ("", "q", "g") for n in NAMES] + [names.fresh("conv") for _ in range(3)]
    assert len(set(roles)) == len(roles)
    assert all(n.isidentifier() and not keyword.iskeyword(n) and n not in dir(builtins) for n in roles)
    assert not set(roles) & {*runtime.__all__, "torch", "box", "at", "get"}
    assert names.of("q", "proj") == names.of("q", "proj") and names.of("", "proj") == "proj"


def test_the_rule_of_a_node_is_asked_for_once(graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(node: fx.Node, *rest: Any) -> Any:
        asked.append(node.name)
        return rules.rule_of(node, *rest)

    monkeypatch.setattr(studied, "rule_of", counted)
    assert not hasattr(program, "rule_of")
    compile_step(graph, "sum", (X,), plan=Schedule(stream=2))
    assert sorted(asked) == sorted(n.name for n in graph.graph.nodes)
