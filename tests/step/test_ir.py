"""Straight-line code: what may be overwritten, and when names go."""

from floorplan.step.ir import Function, Instr, last_uses, statements, text


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
