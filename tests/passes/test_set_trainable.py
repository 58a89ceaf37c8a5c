"""set_trainable: which parameters train under full, none, bias and norm."""

import pytest
import torch
from graphs import golden
from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.driver import Site
from floorplan.passes.set_trainable import CHOICES, trainable


class Net(nn.Module):
    """Convs, every kind of normalization that has parameters, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 8, 1)
        self.bn = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 1, bias=False)
        self.gn = nn.GroupNorm(2, 8)
        self.inn = nn.InstanceNorm2d(8, affine=True)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.ln = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.slope = nn.PReLU()
        self.fc = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inn(self.gn(self.b(self.bn(self.a(x)))))
        x = self.rms(self.ln(self.up(x).mean((2, 3))))
        return self.head(self.slope(self.fc(x)))


NORM = {"bn.weight", "bn.bias", "gn.weight", "gn.bias", "inn.weight", "inn.bias", "ln.weight", "ln.bias", "rms.weight"}
BIAS = {"a.bias", "up.bias", "bn.bias", "gn.bias", "inn.bias", "ln.bias"}
HEAD = {"head.weight", "head.bias"}


def run(what: str, head: bool = False, model: nn.Module | None = None) -> tuple[set[str], list[Site]]:
    """Names that train afterwards, and the log; one parameter begins frozen."""
    gm = fx.symbolic_trace(Net() if model is None else model)
    next(gm.parameters()).requires_grad_(False)
    before = {n: p for n, p in gm.named_parameters()}
    log = list(trainable(what, head).run(gm))
    assert all(p is before[n] for n, p in gm.named_parameters())  # no layer is replaced
    return {n for n, p in gm.named_parameters() if p.requires_grad}, log


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("what,want", [("none", set()), ("bias", BIAS), ("norm", NORM)])
def test_what_trains(what: str, want: set[str], head: bool) -> None:
    found, log = run(what, head)
    assert found == want | (HEAD if head else set())
    assert {s.node for s in log} == {n.rpartition(".")[0] for n in found}


def test_full_trains_everything_even_what_was_frozen() -> None:
    found, log = run("full")
    assert found == {n for n, _ in Net().named_parameters()}
    assert trainable("full").name == "train_full" and len(log) == 11


def test_a_parameter_of_the_model_itself_is_named_after_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    assert run("full", model=Scaled()) == ({"scale"}, [Site("model")])


@pytest.mark.parametrize("what", ["bias", "norm"])
def test_a_model_without_such_parameters_is_refused(what: str) -> None:
    bare = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False))
    with pytest.raises(FloorplanError, match=f"^method {what}: the model has no such parameter"):
        run(what, model=bare)
    assert run("none", model=bare)[0] == set()


def test_choices_are_complete() -> None:
    assert list(CHOICES) == ["full", "none", "bias", "norm"]


def test_golden() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))

    x = torch.randn(2, 3, 2, 2)
    golden(
        [trainable("full")],
        model(),
        x,
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains weight, bias  saves input_1[2, 3, 2, 2]
_1 = BatchNorm2d(_0)  trains weight, bias  saves _0[2, 4, 2, 2]
_2 = ReLU(_1)  saves _2[2, 4, 2, 2]
_3 = Flatten(_2)
_4 = Linear(_3)  trains weight, bias  saves _2[2, 16]
output = output(_4)""",
    )
    golden(
        [trainable("none")],
        model(),
        x,
        """\
input_1 = input()
_0 = Conv2d(input_1)
_1 = BatchNorm2d(_0)
_2 = ReLU(_1)
_3 = Flatten(_2)
_4 = Linear(_3)
output = output(_4)""",
    )
    golden(
        [trainable("none", head=True)],
        model(),
        x,
        """\
input_1 = input()
_0 = Conv2d(input_1)
_1 = BatchNorm2d(_0)
_2 = ReLU(_1)
_3 = Flatten(_2)
_4 = Linear(_3)  trains weight, bias  saves _2[2, 16]
output = output(_4)""",
    )
    golden(
        [trainable("bias")],
        model(),
        x,
        """\
input_1 = input()
_0 = Conv2d(input_1)  trains bias  saves input_1[2, 3, 2, 2]
_1 = BatchNorm2d(_0)  trains bias  saves _0[2, 4, 2, 2]
_2 = ReLU(_1)  saves _2[2, 4, 2, 2]
_3 = Flatten(_2)
_4 = Linear(_3)
output = output(_4)""",
    )
    golden(
        [trainable("norm")],
        model(),
        x,
        """\
input_1 = input()
_0 = Conv2d(input_1)
_1 = BatchNorm2d(_0)  trains weight, bias  saves _0[2, 4, 2, 2]
_2 = ReLU(_1)  saves _2[2, 4, 2, 2]
_3 = Flatten(_2)
_4 = Linear(_3)
output = output(_4)""",
    )
