"""The rules that place blocks, by hand."""

import numpy as np

from floorplan.cost_models.arena_search import Blocks, bundle, first_fit, orders, search, skyline


def blocks(*found: tuple[int, int, int]) -> Blocks:
    born, died, size = zip(*found, strict=True)
    return Blocks.of(born, died, size)


STEPS = blocks((0, 9, 4), (0, 3, 2), (3, 6, 3), (6, 9, 1))  # one that stays, three in turn beside it


def test_sections_are_instants_with_as_much_alive_as_can_be() -> None:
    assert STEPS.sections == 3
    assert (STEPS.first.tolist(), STEPS.last.tolist()) == ([0, 0, 1, 2], [3, 1, 2, 3])
    assert STEPS.live.tolist()[:3] == [6, 7, 5]


def test_a_skyline_raises_its_lowest_step() -> None:
    assert skyline(STEPS, np.array([0, 1, 2, 3])) == ([0, 4, 4, 4], 7)
    assert skyline(STEPS, np.array([1, 2, 3, 0])) == ([3, 0, 0, 0], 7)


def test_first_fit_takes_the_lowest_hole() -> None:
    offsets, top = first_fit(STEPS, [1, 2, 0, 3])
    assert (offsets, top) == ([3, 0, 0, 0], 7)
    low = blocks((0, 2, 2), (0, 4, 2), (2, 4, 2))  # the third goes where the first was
    assert first_fit(low, [0, 1, 2]) == ([0, 2, 0], 4)


def test_first_fit_gives_up_above_a_top_and_goes_on_from_known_offsets() -> None:
    assert first_fit(STEPS, [1, 2, 0, 3], most=6)[1] > 6
    known, _ = first_fit(STEPS, [1, 2, 0, 3])
    assert first_fit(STEPS, [1, 2, 0, 3], known, start=2) == first_fit(STEPS, [1, 2, 0, 3])


def test_what_lives_together_is_one_bundle() -> None:
    tied = bundle(blocks((0, 2, 3), (0, 2, 5), (2, 3, 4)))
    assert tied.members == [[0, 1], [2]] and tied.blocks.size.tolist() == [8, 4]
    found = tied.spread(search(tied.blocks, 0))
    assert found.top == 8 and sorted(found.offsets[:2]) in ([0, 3], [0, 5])


def test_every_order_has_every_block_once() -> None:
    found = orders(STEPS)
    assert len(found) == 9 and all(sorted(o.tolist()) == [0, 1, 2, 3] for o in found.values())
    assert found["bytes"].tolist() == [0, 2, 1, 3] and found["lifetime"].tolist()[0] == 0


def test_search_reaches_the_bound_where_a_rule_does() -> None:
    found = search(STEPS, 0)
    assert found.top == 7 == STEPS.live.max()
    assert search(Blocks.of([], [], []), 0).offsets == []
