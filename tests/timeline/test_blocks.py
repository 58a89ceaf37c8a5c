"""The timeline as a value: what is alive, both peaks with their instants, and how it prints."""

from typing import Any

import pytest

from floorplan.timeline.blocks import Block, StepTimeline, intervals


def block(born: int, died: int, nbytes: int, **rest: Any) -> Block:
    given = {"node": f"n{born}", "direction": "forward", "op": "aten.x", "role": "temporary"} | rest
    return Block(born, died, nbytes, shape=(nbytes,), dtype="uint8", **given)


STEP = StepTimeline(
    "a net",
    (
        block(0, 4, 100, role="gate", node="a"),
        block(1, 3, 40, role="adapter", node="b"),
        block(2, 3, 30, node="b"),
        block(3, 5, 500, node="a", direction="backward"),
        block(4, 5, 60, role="gradient", node="a", direction="backward"),
    ),
    5,
    (("model", 1000), ("optimizer", 120), ("batch", 7)),
)


def test_alive_at_every_event() -> None:
    assert STEP.live == (100, 140, 170, 600, 560)
    assert STEP.kept_live == (100, 140, 140, 100, 60)
    assert [b.nbytes for b in STEP.alive(3)] == [500, 100]


def test_both_peaks_and_their_instants() -> None:
    assert (STEP.peak, STEP.peak_at) == (600, 3)
    assert (STEP.training_state_peak, STEP.training_state_at) == (140 + 1120, 1)
    assert STEP.total == 600 + 1127


def test_what_is_alive_by_node() -> None:
    assert STEP.by_node(3) == [("a", "backward", 500), ("a", "forward", 100)]
    assert STEP.by_node(3, kept=True) == [("a", "forward", 100)]
    assert STEP.by_node(2) == [("a", "forward", 100), ("b", "forward", 70)]


def test_intervals_for_solvers() -> None:
    assert intervals(STEP.blocks)[0] == (0, 4, 100)


def test_an_empty_step() -> None:
    empty = StepTimeline("", (), 0)
    assert (empty.peak, empty.peak_at, empty.training_state_peak, empty.training_state_at, empty.total) == (0,) * 5
    assert str(empty).splitlines() == ["one step: 0 storages", "requested peak 0", "training-state peak 0"]


def test_plain_data() -> None:
    data = STEP.as_json()
    assert (data["peak"], data["peak_at"], data["state"]["model"]) == (600, 3, 1000)
    assert data["blocks"][3]["direction"] == "backward"


@pytest.mark.parametrize(
    "line",
    [
        "a net: 5 storages",
        "requested peak 600 at event 3 of 5: backward of a",
        "              500  a (backward)",
        "training-state peak 1,260 at event 1 of 5: forward of b",
        "               40  b (forward)",
        "apart: model 1,000, optimizer 120, batch 7; in all 1,727",
    ],
)
def test_what_it_prints(line: str) -> None:
    assert line in str(STEP).splitlines()
