"""A verdict is about the model: at other sizes, in its branches, in its state and for real."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import Residual
from symbols import evaluate
from torch import Tensor, nn

import floorplan
from floorplan.graph.untouched import undisturbed
from floorplan.ledger.criterion import ABOVE_FLOOR, AT_FLOOR, UNPROVEN


class Scaled(nn.Module):
    """A frozen conv whose map is kept in full width when the forward multiplies by `gain`, and not when it adds."""

    def __init__(self, keeps: Callable[["Scaled", Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1).requires_grad_(False)
        self.gain, self.keeps, self.limit = nn.Parameter(torch.ones(12, 1, 1)), keeps, 40
        self.register_buffer("memo", torch.zeros(0))
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """gain * map or map + gain"""
        y = self.conv(x)
        return y * self.gain if self.keeps(self, x) else y + self.gain


class Untraced(nn.Module):
    """Runs as a whole, for it has a hook."""

    def __init__(self, keeps: Callable[[Scaled, Tensor], Any]) -> None:
        super().__init__()
        self.inner = Scaled(keeps)
        self.inner.register_forward_hook(lambda m, given, out: None)

    def forward(self, x: Tensor) -> Tensor:
        """The inner module's"""
        return self.inner(x)


def _remembers(m: Scaled, x: Tensor) -> bool:
    with torch.no_grad():
        m.memo.resize_(x.shape[0], 12, *x.shape[2:]).zero_()
    return False


KEEPS: dict[str, Callable[[Scaled, Tensor], Any]] = {
    "a batch above a limit": lambda m, x: x.size(0) > m.limit,
    "a batch below": lambda m, x: x.shape[0] < 3,
    "one batch alone": lambda m, x: x.shape[0] == 77,
    "one of some": lambda m, x: x.shape[0] in (24, 31),
    "an area": lambda m, x: x.shape[2] * x.shape[3] > 5000,
    "odd positions": lambda m, x: x.shape[2] % 2 == 1,
    "a shape that is not square": lambda m, x: x.shape[2] != x.shape[3],
    "a branch within a branch": lambda m, x: x.shape[-1] > 90 if x.shape[0] > 20 else False,
    "both at once": lambda m, x: x.shape[0] > 20 and x.shape[-2] > 70,
    "the number of elements": lambda m, x: x.numel() > 10**6,
    "a number of a size": lambda m, x: int(x.shape[0]) > 30,
    "a length": lambda m, x: len(x) > 30,
    "a loop": lambda m, x: sum(1 for _ in range(x.shape[0])) > 30,
    "state that grows": _remembers,
    "data": lambda m, x: type(x) is Tensor,
}


@pytest.mark.parametrize("kind", KEEPS)
def test_a_map_kept_at_other_sizes_is_found(kind: str) -> None:
    report = floorplan.check(Scaled(KEEPS[kind]), torch.randn(6, 3, 16, 16))
    assert report.verdict != "AT_FLOOR", list(report.rests_on())


@pytest.mark.parametrize("kind", ["a batch above a limit", "an area", "a length"])
def test_so_is_one_inside_what_is_not_traced(kind: str) -> None:
    assert floorplan.check(Untraced(KEEPS[kind]), torch.randn(6, 3, 16, 16)).verdict != "AT_FLOOR"


def test_the_report_names_tensor_line_and_sizes() -> None:
    report = floorplan.check(Scaled(KEEPS["a batch above a limit"]), torch.randn(6, 3, 16, 16))
    said = next(n for n in report.notes if "other tensors are kept" in n)
    assert report.verdict == "ABOVE_FLOOR" and "at B = 48, H0 = 16" in said and "test_examine.py:" in said
    assert "torch.float32 [48, 12, 16, 16], 589,824 bytes" in said


@pytest.mark.parametrize("kind", [None, "never"])
def test_a_model_that_keeps_the_floor_everywhere_is_at_it(kind: str | None) -> None:
    model = Scaled((lambda m, x: False) if kind is None else (lambda m, x: x.shape[0] > 40 and x.shape[0] < 40))
    report = floorplan.check(model, torch.randn(6, 3, 16, 16))
    assert report.verdict == "AT_FLOOR", list(report.rests_on())
    assert any("tried on the model itself" in a for a in report.proof.assumptions)


def test_no_data_is_touched_where_that_is_asked() -> None:
    model = Scaled(lambda m, x: m.past.__iadd__([x]) is None if type(x) is Tensor else False)
    assert floorplan.check(model, torch.randn(6, 3, 16, 16), run=False).verdict == "AT_FLOOR" and not model.past
    floorplan.check(model, torch.randn(6, 3, 16, 16))
    assert not model.past


def test_a_resized_buffer_is_as_before() -> None:
    model = Scaled(_remembers)
    with undisturbed(model):
        model(torch.randn(2, 3, 8, 8))
        assert model.memo.shape == (2, 12, 8, 8)
    assert model.memo.shape == (0,) and model.memo.untyped_storage().nbytes() == 0


def test_a_grouped_bottleneck_is_named_and_one_as_wide_as_its_input_is_none() -> None:
    def net(groups: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.ReLU())

    x = torch.randn(2, 3, 8, 8)
    named = floorplan.check(net(2), x, rank=2, sites="all")
    assert named.verdict == "AT_FLOOR" and "the bottleneck of 2 groups of rank 2" in str(named).splitlines()[-1]
    assert floorplan.check(net(8), x, rank=2, sites="all").verdict == "ABOVE_FLOOR"


def test_the_mode_is_said() -> None:
    for mode in ("train", "eval"):
        report = floorplan.check(Residual(), torch.randn(2, 3, 16, 16), mode=mode)
        assert f"in {mode} mode" in str(report) and report.as_json()["mode"] == mode


def test_a_batch_guard_is_tried_on_the_other_side() -> None:
    for batch in (2, 20):
        report = floorplan.check(Residual(), torch.randn(batch, 3, 16, 16), rank=2, sites="all")
        about = [a for a in report.proof.assumptions if a.startswith("B ")]
        assert all("tried at B =" in a for a in about)


def test_the_formulas_hold_at_any_batch() -> None:
    small = floorplan.check(Residual(), torch.randn(3, 3, 16, 16))
    large = floorplan.check(Residual(), torch.randn(40, 3, 16, 16))
    at_40 = evaluate(small.proof.kept, {**small.proof.symbols, "B": 40})
    assert at_40 == large.predicted.saved


class Hidden(nn.Module):
    """Keeps a full map where a condition holds that tracing, or a run on fakes of one size, does not see."""

    def __init__(self, condition: Any) -> None:
        super().__init__()
        self.condition, self.table = [condition], {48: 1}
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 1)
        self.requires_grad_(False)
        self.g = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.condition[0](self, x):
            y = y * (self.g + 1)
        return self.b(y) + self.g


HIDDEN = {
    "isinstance": lambda s, x: isinstance(x, Tensor) and x.shape[-1] > 40,
    "is_tensor": lambda s, x: torch.is_tensor(x) and x.shape[0] >= 100,
    "type": lambda s, x: type(x) is not torch.fx.Proxy and x.shape[-1] > 40,
    "in a set": lambda s, x: x.shape[0] in {33, 35},
    "in a table": lambda s, x: x.shape[-1] in s.table,
    "looked up": lambda s, x: s.table.get(x.shape[-1]),
    "sizes in a set": lambda s, x: tuple(x.shape[2:]) in {(48, 16)},
    "as text": lambda s, x: str(x.shape[0]) == "33",
    "in a text": lambda s, x: f"{x.shape[0]}" == "33",
    "the shape as text": lambda s, x: repr(x.shape) == "torch.Size([33, 3, 16, 16])",
    "hashed": lambda s, x: hash(x.shape[0]) == 33,
    "behind two others": lambda s, x: x.shape[2] + 1 == 9 and x.shape[0] % 3 != 0 and x.shape[0] > 9,
    "three at once": lambda s, x: x.shape[3] + 1 < 33 and x.shape[2] + 1 != 9 and x.shape[0] > 33,
    "pieces of the batch": lambda s, x: [0 for t in x.split(32)][1:],
    "pieces of a row": lambda s, x: len(x.split(64, dim=-1)) > 1,
    "chunks": lambda s, x: len(x.chunk(40)) > 30,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_branches_that_tracing_does_not_see_are_heard(name: str) -> None:
    report = floorplan.check(Hidden(HIDDEN[name]), torch.randn(4, 3, 16, 16))
    assert report.verdict in (ABOVE_FLOOR, UNPROVEN)
    assert any("other tensors are kept" in n or "not proved for other sizes" in n for n in report.notes)


def test_a_rewrite_says_what_its_graph_does_not_follow() -> None:
    result = floorplan.rewrite(Hidden(HIDDEN["isinstance"]).requires_grad_(True), torch.randn(4, 3, 16, 16), rank=2)
    assert any("its code asks" in n and "W0 > 40" in n for n in result.report.after.notes)


def test_a_model_without_such_a_branch_is_proved_still() -> None:
    for fn in (
        lambda s, x: False,
        lambda s, x: isinstance(x, Tensor) and x.dim() == 5,
        lambda s, x: len(x.chunk(3, 1)) > 3,
    ):
        assert floorplan.check(Hidden(fn), torch.randn(4, 3, 16, 16)).verdict == AT_FLOOR
