"""Which convs get an adapter under --sites, and the reason given to those that do not."""

import pytest
from torch import nn

from floorplan.graph.choose import Shape, choose, shape_of
from floorplan.graph.fold import to_site

POINT = Shape(pointwise=True, depthwise=False, groups=1, width=8)
DEPTH = Shape(pointwise=False, depthwise=True, groups=8, width=1)
GROUPED = Shape(pointwise=False, depthwise=False, groups=2, width=4)
SPATIAL = Shape(pointwise=False, depthwise=False, groups=1, width=8)
NARROW = Shape(pointwise=True, depthwise=False, groups=1, width=2)
NET = {"a.point": POINT, "a.depth": DEPTH, "b.grouped": GROUPED, "b.spatial": SPATIAL, "narrow": NARROW}


def chosen(sites: str, rank: int = 2, **convs: Shape) -> list[str]:
    """Names that get an adapter."""
    return [path for path, why in choose(convs or NET, sites, rank).items() if not why]


def test_auto_takes_pointwise_convs_of_a_net_with_depthwise_ones() -> None:
    assert chosen("auto") == ["a.point"]
    why = choose(NET, "auto", 2)
    assert why["a.depth"] == "depthwise: one input channel a group, so q would be as wide as the input"
    assert why["b.grouped"] == why["b.spatial"] == "not a pointwise conv"
    assert why["narrow"] == "rank 2 is no smaller than its input width 2"


def test_auto_takes_every_ungrouped_conv_of_a_net_without_depthwise_ones() -> None:
    assert chosen("auto", p=POINT, g=GROUPED, s=SPATIAL, n=NARROW) == ["p", "s"]
    why = choose({"g": GROUPED, "s": SPATIAL}, "auto", 2)
    assert why == {"g": "grouped (2 groups); --sites all adapts it too", "s": ""}


def test_auto_takes_spatial_convs_where_no_pointwise_one_would_be_left() -> None:
    assert chosen("auto", d=DEPTH, s=SPATIAL, n=NARROW) == ["s"]
    assert chosen("auto", rank=1, d=DEPTH, s=SPATIAL, n=NARROW) == ["n"]


def test_auto_takes_grouped_convs_where_there_are_no_others() -> None:
    wide, thin = Shape(False, False, 2, 8), Shape(False, False, 16, 2)
    for net in (
        {"g": GROUPED, "w": wide},
        {"d": DEPTH, "g": GROUPED, "w": wide},
        {"n": NARROW, "g": GROUPED, "w": wide},
    ):
        assert chosen("auto", 2, **net) == ["g", "w"]
    assert chosen("auto", 4, g=GROUPED, w=wide) == ["w"]
    # groups*rank channels in the place of as many: no bottleneck
    assert chosen("auto", 2, t=thin, w=wide) == ["w"] and chosen("auto", 2, t=thin) == []
    assert choose({"t": thin}, "auto", 2) == {"t": "grouped (16 groups); --sites all adapts it too"}


def test_all_takes_grouped_ones_and_a_rank_as_wide_as_the_input() -> None:
    assert chosen("all") == ["a.point", "b.grouped", "b.spatial", "narrow"]
    assert chosen("all", rank=4) == ["a.point", "b.grouped", "b.spatial"]
    assert chosen("all", rank=5) == ["a.point", "b.spatial"]
    assert chosen("all", rank=9) == []


def test_a_wider_rank_than_the_input_is_refused_whoever_asks() -> None:
    assert choose({"n": NARROW}, "n", 3) == {"n": "rank 3 is no smaller than its input width 2"}
    assert choose({"n": NARROW}, "n", 2) == {"n": ""}


def test_pointwise_and_ungrouped_by_name() -> None:
    assert chosen("pointwise") == ["a.point", "narrow"]
    assert chosen("ungrouped") == ["a.point", "b.spatial", "narrow"]


def test_globs_match_paths_and_never_a_depthwise_conv() -> None:
    assert chosen("a.*") == ["a.point"]
    assert chosen("*.spatial, b.g*") == ["b.grouped", "b.spatial"]
    assert chosen("B.*") == []  # case counts
    assert choose(NET, "x*", 2)["a.point"] == "not matched by --sites x*"


@pytest.mark.parametrize(
    "conv,want",
    [
        (nn.Conv2d(8, 4, 1), Shape(True, False, 1, 8)),
        (nn.Conv2d(8, 4, (1, 3)), Shape(False, False, 1, 8)),
        (nn.Conv2d(8, 4, 1, groups=2), Shape(False, False, 2, 4)),
        (nn.Conv1d(6, 12, 1, groups=6), Shape(False, True, 6, 1)),
        (nn.Conv2d(1, 4, 1), Shape(True, False, 1, 1)),
        (nn.ConvTranspose3d(8, 6, 2, groups=2), Shape(False, False, 2, 4)),
        (nn.ConvTranspose2d(8, 6, 1, stride=2), Shape(True, False, 1, 8)),
    ],
    ids=str,
)
def test_the_shape_of_a_conv_is_that_of_its_site(conv: nn.Module, want: Shape) -> None:
    assert shape_of(conv) == shape_of(to_site(conv)) == want
