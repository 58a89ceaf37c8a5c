"""The step benchmark's table: which row answers a goal, what is counted, what is said of missing figures."""

from typing import Any

import pytest

from benchmarks.step_table import Figures, Goal, best, bound_ratio, page

MADE = {"kind": "compiled", "layout": "channels_last", "micro_batch": 0, "stages": [], "last": 0}


def row(name: str, peak: int, wall: float | None = None, **made: Any) -> Figures:
    """A row of a peak in MB, with 2 MB that stand apart."""
    state = {"model": 1_500_000, "optimizer": 200_000, "batch": 300_000}
    peak *= 10**6
    memory = {"predicted": peak, "measured": peak, "same": True, "bound": peak // 2, "state": state}
    cells: dict[str, Any] = {"memory": memory}
    if wall is not None:
        cells |= {"time 1": {"wall": 9.0, "cpu": 9.0}, "time 2": {"wall": wall, "cpu": 2 * wall}}
    return Figures(name, MADE | made, cells)


def document(*rows: Figures) -> dict[str, Any]:
    """Results of one net."""
    found = {r.name: {"made": r.made, "cells": r.cells} for r in rows}
    return {"nets": {"mobilenet_v2": {"title": "MNv2", "versions": {"torch": "0"}, "rows": found}}}


@pytest.mark.parametrize(
    "goal,rows,want",
    [
        (Goal("n", 10, 1.0), [row("big", 20, 0.1), row("slow", 5, 0.9), row("fast", 9, 0.5)], "fast"),
        (Goal("n", 10, 1.0, 8), [row("slow", 5, 0.9), row("fast", 9, 0.5)], "slow"),  # the total counts too
        (Goal("n", 4, 1.0), [row("big", 20, 0.1), row("small", 5, 0.9)], "small"),  # none fits
        (Goal("n", 10, 1.0), [row("timed", 8, 0.5), row("untimed", 9)], "timed"),
        (Goal("n", 10, 1.0), [row("small", 5), row("large", 9), row("big", 20)], "large"),
        (Goal("n", 10, 1.0), [row("autograd", 1, 0.1, kind="autograd"), row("fast", 9, 0.5)], "fast"),
    ],
)
def test_the_row_that_answers_a_goal(goal: Goal, rows: list[Figures], want: str) -> None:
    found = best(goal, rows)
    assert found is not None and found.name == want


def test_nothing_answers_without_rows() -> None:
    assert best(Goal("n", 1, 1), []) is None


def test_what_is_counted() -> None:
    r = row("r", 10, 0.5)
    assert (r.total, r.peak, bound_ratio(r)) == (12_000_000, 10_000_000, 2.0)
    assert row("m", 1, micro_batch=16, stages=[["a", 4], ["b", 0]], last=8).part == 4 and r.part == 0


def cells_of(text: str, word: str) -> list[list[str]]:
    """Cells of the page's table lines that hold a word."""
    lines = [line for line in text.splitlines() if line.startswith("|") and word in line]
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in lines]


def test_verdicts_of_the_page() -> None:
    rows = [row("compiled, a", 17, 0.7), row("compiled, b|c", 12, 0.95), row("compiled, d", 4)]
    asked = cells_of(page(document(*rows)), "peak ≤")
    assert [c[-1] for c in asked] == ["yes", "no", "not timed"]
    timed = [*rows[:2], row("compiled, d", 4, 1.2)]
    asked = cells_of(page(document(*timed)), "peak ≤")
    assert [c[2] for c in asked] == ["a", "b\\|c", "d"] and [c[-1] for c in asked] == ["yes", "no", "no"]
    assert [c[-2] for c in asked] == ["0.70", "0.95", "1.20"]


def test_exactness_names_the_worst_row() -> None:
    off = row("compiled, off", 10)
    off.cells["memory"]["predicted"] -= 7
    off.cells["gradients"] = {"error": 3e-11}
    fine = row("compiled, fine", 10)
    fine.cells["gradients"] = {"error": 2e-15}
    exact = [c[2:] for c in cells_of(page(document(off, fine)), "compiled, off)")]
    assert ["7 (MNv2: compiled, off)", "2", "1"] in exact and ["3e-11 (MNv2: compiled, off)", "2", "1"] in exact


def test_missing_and_failed_cells_are_said() -> None:
    r = Figures("compiled, none", MADE, {"memory": {"failed": "RuntimeError: why"}, "time 2": {"failed": "x"}})
    text = page(document(r))
    assert "- compiled, none, memory: RuntimeError: why" in text
    assert "| compiled, none | -" in " ".join(text.split())
