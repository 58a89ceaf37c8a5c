"""What a model's own code asks of sizes is heard, in order; what torch asks is not."""

import torch
from hard_nets import Lambda
from torch import nn

from floorplan.ledger.points import Axes
from floorplan.ledger.questions import Heard, heard
from floorplan.ledger.run import Step


def asked(run: object) -> Heard:
    model, x = Lambda(run, conv=nn.Conv2d(3, 4, 3, padding=1)), torch.randn(6, 3, 8, 8)
    return heard(Step(model, (x,)), Axes.plain((x,)), {"B": 6, "H0": 8, "W0": 8})


def test_comparisons_come_with_their_answers() -> None:
    found = asked(lambda m, x: m.conv(x) if x.shape[0] > 4 and x.shape[2] * 2 == 8 else x)
    assert [(str(r), held) for r, held in found.answers] == [("B > 4", True), ("Eq(2*H0, 8)", False)]
    assert found.numbers == () and found.failed == ""


def test_a_number_of_a_size_is_named_with_its_line() -> None:
    found = asked(lambda m, x: m.conv(x) * len(x))
    assert found.numbers and "test_questions.py:" in found.numbers[0] and "makes a number of B" in found.numbers[0]


def test_widths_and_torch_ask_nothing() -> None:
    assert asked(lambda m, x: torch.cat([m.conv(x)] * x.shape[1]).relu() if x.shape[1] > 2 else x) == Heard((), ())


def test_what_cannot_be_followed_is_said() -> None:
    assert asked(lambda m, x: m.conv(x) * {6: 1}[x.shape[0]]).failed
