"""Tracing: leaves, inputs, decisions on sizes, modes, and a model left as it was."""

import collections
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations
from traced_nets import Net, X, agree, conv, same, targets

from floorplan.errors import TraceError
from floorplan.graph.trace import trace
from floorplan.layers.plain import TrainingFlag


def test_plain_model_runs_nothing_and_names_lines() -> None:
    model = Net(lambda s, x: F.relu(s.c(x)), c=conv())
    t = trace(model, [X])
    assert targets(t) == ["x", "c", "relu", "output"] and not t.notes and not t.opaque
    assert t.lines["relu"].startswith("test_trace.py:") and t.lines["c"] == t.lines["relu"]
    assert t.gm.get_parameter("c.weight") is model.get_parameter("c.weight")
    same(model, t, X)


def test_a_torch_sequential_has_no_user_lines() -> None:
    t = trace(nn.Sequential(conv(), nn.ReLU()), [X])
    assert not t.lines and targets(t) == ["input", "0", "1", "output"]


class Add(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OnlyInit(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 3, 1)


def test_overriding_forward_decides_between_leaf_and_trace() -> None:
    model = nn.Sequential(OnlyInit(), Add(3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    t = trace(model, [X])
    assert targets(t)[:2] == ["input", "0"] and "batch_norm" in targets(t)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert "add_" in targets(t), "num_batches_tracked must stay a node, not run while tracing"
    t = trace(model, [X], both_modes=True)
    assert t.notes == ("forward counts in 1.num_batches_tracked, which the adapted model leaves as they are",)
    same(model, t, X)


def test_modules_that_must_not_be_opened_are_opaque() -> None:
    c = [conv() for _ in range(4)]
    c[0] = parametrizations.weight_norm(c[0])
    with pytest.warns(FutureWarning):
        c[1] = nn.utils.weight_norm(c[1])
    c[2].register_forward_hook(lambda m, i, o: o * 2)
    c[3].forward = lambda x: x + 1  # type: ignore[method-assign,assignment]
    model = nn.Sequential(*c)
    t = trace(model, [X])
    assert t.opaque == {
        "0": "its weight is parametrized (torch.nn.utils.parametrize)",
        "1": "its weight is recomputed by old-style WeightNorm",
        "2": "it has forward hooks",
        "3": "its forward is patched on the instance",
    }
    assert torch.equal(model(X), t.gm(X))


class Defaults(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, k: int = 2) -> Tensor:
        return x * k if mask is None else x * mask


def test_defaults_none_and_missing_inputs() -> None:
    t = trace(Defaults(), [X])
    assert [n.name for n in t.gm.graph.nodes if n.op == "placeholder"] == ["x"]
    same(Defaults(), t, X)
    assert targets(trace(Defaults(), [X, X])) == ["x", "mask", "mul", "output"]
    t = trace(Defaults(), [X, None])
    assert t.notes == ("forward: mask is always None",)
    assert torch.equal(t.gm(X, None), X * 2)
    with pytest.raises(TraceError, match="needs `x`, but 0 inputs"):
        trace(Defaults(), [])
    with pytest.raises(TraceError, match="takes 3 inputs, 4 are given"):
        trace(Defaults(), [X, X, 2, 3])


class Star(nn.Module):
    def forward(self, *xs: Tensor, scale: float = 2.0) -> Tensor:
        return sum(xs[1:], xs[0]) * scale


def test_star_args_and_nested_inputs() -> None:
    same(Star(), trace(Star(), [X, X, X]), X, X, X)
    model = Net(lambda s, d: d["a"] + sum(t for t in d["b"]))
    t = trace(model, [{"a": X, "b": [X, X]}])
    assert "loop unrolled 2 times" in t.notes[0]
    assert torch.equal(t.gm({"a": X, "b": [X, X]}), X + (X + X))
    model = Net(lambda s, d: [v * len(k) for k, v in d.items()])
    t = trace(model, [{"a": X, "bb": X}])
    assert torch.equal(t.gm({"a": X, "bb": X})[1], X * 2)


class Fuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hi, self.lo = conv(), nn.Conv2d(3, 3, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.hi(x), self.lo(x)
        if a.shape[-1] != b.shape[-1]:
            b = F.interpolate(b, size=a.shape[-2:])
        assert x.dim() == 4 and len(x.shape) == 4
        return cast(Tensor, a + b)


@pytest.mark.parametrize("fake", [False, True])
def test_branch_on_sizes_is_decided_and_noted(fake: bool) -> None:
    x = FakeTensorMode().from_tensor(X) if fake else X
    t = trace(Fuse(), [x])
    (note,) = t.notes
    assert note.startswith("test_trace.py:") and note.endswith(
        "branch decided for input sizes (2, 3, 7, 7): a.shape[-1] != b.shape[-1] is True"
    )
    bigger = torch.randn(5, 3, 9, 9)
    model = Fuse()
    agree(model, trace(model, [X]).gm, bigger)  # sizes stay symbolic
    assert "ne" not in targets(t), "what only the decision looked at is gone"


def test_sizes_as_numbers() -> None:
    model = Net(lambda s, x: torch.stack([x[i] for i in range(x.shape[0])]) * int(x.size(-1) / 2))
    t = trace(model, [X])
    assert len(t.notes) == 2 and all("a size is fixed at" in n for n in t.notes)
    same(model, t, X)
    model = Net(lambda s, x: x.new_zeros(x.shape[0], 1, 1, 1) + torch.zeros((x.shape[-1],)) + x)
    t = trace(model, [X])
    assert not t.notes, "torch only looked at the size, and the node stayed symbolic"
    agree(model, t.gm, torch.randn(4, 3, 5, 5))


class Pair(NamedTuple):
    a: Tensor
    b: Any


def test_output_containers_keep_their_types() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        return collections.OrderedDict(out=x + 1, more={"p": Pair(x, [x * 2, (x, None)])})

    t = trace(Net(forward), [X])
    out = t.gm(X)
    assert type(out) is collections.OrderedDict and list(out) == ["out", "more"]
    assert type(out["more"]["p"]) is Pair and torch.equal(out["more"]["p"].b[0], X * 2)
    assert type(out["more"]["p"].b[1]) is tuple


def test_in_place_stays_in_place() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = x * 1
        z = y
        y += x
        y[:, 1:] = 5.0
        y[:, 0] *= 2
        y.mul_(3)
        return y, z

    model = Net(forward)
    t = trace(model, [X])
    assert {"iadd", "setitem", "imul", "mul_"} <= set(targets(t))
    y, z = t.gm(X)
    assert torch.equal(y, z)
    same(model, t, X)


class Modes(nn.Module):
    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.c, self.branch = conv(), branch

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.c(x), 0.5, self.training)
        if self.branch and self.training:
            x = x * 2
        return F.dropout2d(x, training=not self.training)


@pytest.mark.parametrize("flags", [(True, True), (False, False), (True, False), (False, True)])
def test_both_modes_follow_the_flag(flags: tuple[bool, bool]) -> None:
    model = nn.Sequential(Modes(), Modes())
    model[0].train(flags[0])
    model[1].train(flags[1])
    before = {n: m.training for n, m in model.named_modules()}
    t = trace(model, [X], both_modes=True)
    assert before == {n: m.training for n, m in model.named_modules()}
    kinds = {n: m for n, m in t.gm.named_modules() if isinstance(m, TrainingFlag)}
    assert {n.partition(".")[0]: m.training for n, m in kinds.items()} == {"0": flags[0], "1": flags[1]}
    torch.manual_seed(0)
    mine = t.gm(X)
    torch.manual_seed(0)
    assert torch.equal(mine, model(X)), "in the mixed mode as given"
    assert not t.notes
    same(model, t, X)


def test_both_modes_with_a_branch_keeps_eval() -> None:
    model = Modes(branch=True)
    t = trace(model, [X], both_modes=True)
    assert "forward differs between train and eval mode (first difference: test_t" in t.notes[-1]
    assert not any(isinstance(m, TrainingFlag) for m in t.gm.modules())
    assert model.training and model.c.training
    with pytest.raises(TraceError):
        trace(nn.Sequential(nn.LazyLinear(3)), [X], both_modes=True)


def test_the_model_is_left_as_it_was() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        s.seen = s.c(x)
        s.count = s.count + 1
        return s.seen + torch.ones(7) + s.plain

    model = Net(forward, c=conv())
    model.count, model.plain = 0, torch.full((7,), 2.0)  # type: ignore[assignment]
    keys = set(model.__dict__)
    t = trace(model, [X])
    assert set(model.__dict__) == keys and model.count == 0
    text = "\n".join(t.notes)
    assert "forward assigns to seen" in text and "forward assigns to count" in text
    assert "constant buffer" in text and "plain tensor attribute plain becomes a buffer" in text
    assert torch.equal(t.gm(X), model(X))


def test_unused_layers_and_buffer_persistence_survive() -> None:
    model = Net(lambda s, x: s.c(x) + s.scale, c=conv(), aux=nn.Sequential(conv()))
    model.register_buffer("scale", torch.ones(7), persistent=False)
    t = trace(model, [X])
    same(model, t, X)
    assert t.gm.aux is model.aux


def test_modules_made_in_forward_and_shared_modules() -> None:
    model = Net(lambda s, x: nn.ReLU()(s.d(s.c(x))), c=conv())
    model.d = model.c
    same(model, trace(model, [X]), X)


def test_graph_modules_are_kept_or_traced_through() -> None:
    gm = fx.symbolic_trace(nn.Sequential(conv(), nn.ReLU()))
    t = trace(gm, [X])
    assert t.gm is not gm and [n.name for n in t.gm.graph.nodes] == [n.name for n in gm.graph.nodes]
    same(gm, t, X)
    model = nn.Sequential(gm, conv())
    t = trace(model, [X])
    assert targets(t) == ["input", "0.0", "0.1", "1", "output"]
    same(model, t, X)


def test_exported_and_scripted_modules() -> None:
    exported = torch.export.export(Defaults(), (X,)).module()
    t = trace(exported, [X])
    assert t.notes == ("torch.export's checks of the inputs are left out",) and not t.opaque
    assert torch.equal(t.gm(X), X * 2)
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    t = trace(nn.Sequential(conv(), scripted), [X])
    assert t.opaque == {"1": "it is a TorchScript module"}
    assert trace(scripted, [X]).opaque == {"model": "it is a TorchScript module"}


def test_training_flag_has_no_options() -> None:
    assert TrainingFlag().config() == {} and TrainingFlag().eval()() is False


class Counts(Net):
    """A conv, and something that the forward does in train mode alone."""

    def __init__(self, fn: Any, **parts: nn.Module) -> None:
        super().__init__(fn, c=conv(), **parts)
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.fn(self)
        return F.dropout(self.c(x), 0.5, self.training).add_(1)


def _again(s: Any) -> None:
    s.n = s.n + 1


def _plus(s: Any) -> None:
    s.n += 1


@pytest.mark.parametrize("count", [_again, _plus, lambda s: s.n.add_(1), lambda s: s.n.add_(2), lambda s: s.n.add(1)])
def test_a_counter_of_train_mode_is_no_other_graph(count: Any) -> None:
    t = trace(Counts(count), [X], both_modes=True)
    assert not any("eval-mode graph" in note for note in t.notes) and any("counts in n" in note for note in t.notes)
    assert "n" in t.gm.state_dict() and not t.opaque
    assert t.own is not None and "n" in targets(t.own) and "n" not in targets(t)
    torch.testing.assert_close(t.gm.eval()(X), t.gm.c(X) + 1)
    assert not torch.equal(t.gm.train()(X), t.gm.eval()(X))


@pytest.mark.parametrize("train_only", [lambda s: s.c.weight.data.mul_(1), lambda s: s.c(torch.zeros(1, 3, 7, 7))])
def test_what_train_mode_does_besides_is_said(train_only: Any) -> None:
    t = trace(Counts(train_only), [X], both_modes=True)
    assert "once adapted, the model computes and returns in train mode" in t.notes[-1]
