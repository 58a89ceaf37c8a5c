"""Stored graphs: names, paths and values are checked before anything is made of them."""

from typing import Any

import pytest
import torch
from documents import X, call, document, image, refused, same
from torch import fx, nn

from floorplan.errors import LoadError
from floorplan.store.artifact import decode, encode
from floorplan.store.graphs import Reader


@pytest.mark.parametrize("op", ["call_module", "get_attr"])
@pytest.mark.parametrize(
    "target",
    [
        "__class__",
        "body.__class__",
        "body.0.__init__",
        "forward",
        "_modules",
        "",
        ".",
        "..",
        "body",
        "../../etc/passwd",
        "/etc/passwd",
        "body.0.forward",
        'body.0", x) or exec("1',
        "skip.weight.data",
        "skip.weight.T",
        "graph",
        "_parameters",
        "training",
        "nowhere",
        "body..0",
    ],
)
def test_hostile_paths(op: str, target: str) -> None:
    refused(call(target, *([X] if op == "call_module" else []), op=op), "y")


INJECTION = "__import__('os').mkdir('/nowhere')"


@pytest.mark.parametrize("text", [INJECTION, "a=1, b", "x\n", "x y", "__class__", "lambda", "torch"])
def test_hostile_names(text: str) -> None:
    d = call("torch.relu", X)
    d["graph"][1]["kwargs"] = {text: 1}
    refused(d, "y")
    for key, record in (("name", 1), ("name", 0), ("target", 0)):
        d = call("torch.relu", X)
        d["graph"][record][key] = text
        refused(d)
    refused(call("torch.relu", X) | {text: 1})


def test_star_arguments_are_allowed_and_checked() -> None:
    d = call("torch.relu", X)
    d["graph"][0]["target"] = "*" + INJECTION
    refused(d)
    d["graph"][0]["target"] = "**x"
    assert "**x" in decode(d).code


def test_values_that_explode_or_nest_are_bounded() -> None:
    wide: list[Any] = [0] * 10
    for _ in range(20):
        wide = [wide] * 10
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(LoadError, match="too large"):
        Reader(left=10_000).value(wide, "y")
    with pytest.raises(LoadError, match="not an encoded value"):
        Reader().value({"a": wide, "b": wide}, "y")
    for value in (deep, loop):
        refused(call("torch.relu", X, value), "y")
        refused(document() | {"meta": {"a": value}}, "meta")


def test_aten_overloads_round_trip() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, x), {"alpha": 2})
    graph.output(graph.call_function(torch.ops.aten._softmax.default, (y, 1, False)))
    gm = fx.GraphModule(nn.Module(), graph)
    back = decode(encode(gm))
    assert [n.target for n in back.graph.nodes] == [n.target for n in gm.graph.nodes]
    same(gm(image()), back(image()))
