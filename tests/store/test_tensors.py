"""Stored tensors: kinds, ties and trainability survive; what does not fit is refused."""

from pathlib import Path
from typing import Any

import torch
from documents import document, image, refused, round_trip, same, traced
from torch.nn import functional as F


def test_hostile_tensors() -> None:
    def changed(key: str, **values: Any) -> dict[str, Any]:
        d = document()
        d[key] = d[key] | values
        return d

    refused(changed("state", **{"skip.weight": torch.ones(4, 3, 2, 2)}), "skip.weight")
    refused(changed("state", **{"skip.weight": torch.ones(4, 3, 1, 1).to_sparse()}), "skip.weight")
    refused(changed("state", **{"skip.weight": [1.0]}), "skip.weight")
    refused(changed("state", extra=torch.ones(1)), "kinds")
    refused(changed("kinds", **{"skip.weight": "constant"}), "skip.weight")
    refused(changed("kinds", **{"skip.weight": "code"}), "skip.weight")
    refused(changed("tied", **{"skip.weight": "body.0.weight"}), "skip.weight")
    d = changed("state", forward=torch.ones(1))
    d["kinds"]["forward"] = "constant"
    refused(d, "forward")
    d = document()
    del d["state"]["skip.weight"], d["kinds"]["skip.weight"]
    d["requires_grad"].remove("skip.weight")
    refused(d, "skip.weight")
    d = document()
    d["requires_grad"].append("body.1.num_batches_tracked")
    refused(d)


def test_sharing_and_ties_survive(tmp_path: Path) -> None:
    gm = traced("shared")
    gm.add_module("again", gm.get_submodule("first"))
    second = [n for n in gm.graph.nodes if n.target == "first"][1]
    second.target = "again"
    read = next(n for n in gm.graph.nodes if n.op == "get_attr")
    read.target = "again.weight"
    gm.recompile()
    back = round_trip(gm, tmp_path)
    assert back.code == gm.code and "again.weight" in back.code
    same(back(image()), gm(image()))
    assert list(back.state_dict()) == list(gm.state_dict())
    assert back.again is back.first
    assert back.other.weight is back.first.weight
    assert len(list(back.parameters())) == 3


def test_kinds_of_tensor_survive(tmp_path: Path) -> None:
    gm = traced("constants")
    shift = gm.get_buffer("shift")
    del gm.shift
    gm.register_buffer("shift", shift, persistent=False)
    back = round_trip(gm, tmp_path)
    assert list(back.state_dict()) == list(gm.state_dict())
    assert [n for n, _ in back.named_parameters()] == ["scale"]
    assert "shift" in dict(back.named_buffers()) and "shift" not in back.state_dict()


def test_bare_constant_survives(tmp_path: Path) -> None:
    gm = traced("residual")
    object.__setattr__(gm, "bare", torch.tensor(0.5))
    relu = next(n for n in gm.graph.nodes if n.target is F.relu6)
    with gm.graph.inserting_before(relu):
        bare = gm.graph.create_node("get_attr", "bare")
        relu.args = (gm.graph.call_function(torch.mul, (relu.args[0], bare)),)
    gm.recompile()
    assert "bare" not in dict(gm.named_buffers())
    back = round_trip(gm, tmp_path)
    assert "bare" in vars(back)
    same(gm(image()), back(image()))


def test_requires_grad_dtype_and_strides_survive(tmp_path: Path) -> None:
    gm = traced("residual").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    gm.skip.to(torch.bfloat16)
    gm.body.get_submodule("1").double()
    gm.get_parameter("body.0.weight").requires_grad_(False)
    back = round_trip(gm, tmp_path)
    for name, t in gm.state_dict(keep_vars=True).items():
        found = back.state_dict(keep_vars=True)[name]
        assert (found.dtype, found.stride()) == (t.dtype, t.stride())
        assert found.requires_grad == t.requires_grad
        assert torch.equal(found, t)
