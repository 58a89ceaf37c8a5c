"""`why`: nodes, modules, containers, refusals, names that are not there."""

import pytest
from expecttest import assert_expected_inline
from hard_nets import Lambda, same
from kinds import images
from torch import nn

import floorplan
from floorplan.errors import FloorplanError
from floorplan.ledger.report import CheckReport
from floorplan.ledger.why import why as explained


def report(rank: int | None = None) -> CheckReport:
    body = nn.Sequential(same(3, 8), nn.ReLU(), nn.Sequential(same(8, 8), nn.SiLU()))
    model = Lambda(lambda m, x: m.fc(m.body(x).mean((2, 3))), body=body, fc=nn.Linear(8, 2))
    return floorplan.check(model, images(), rank=rank)


def why(found: CheckReport, name: str) -> str:
    """The words alone."""
    return str(explained(found, name))


def test_a_module_and_its_node_are_the_same() -> None:
    found = why(report(), "body.2.1")
    assert found == why(report(), "body_2_1")
    assert "body_2_1 (SiLU) saves a tensor: kept for the backward" in found
    assert "pillar   activation" in found and "bytes    18,432 = 4*B*C1*H0*W0" in found
    assert "where    C1 = 8" in found


def test_a_container_lists_what_is_inside_and_counts_storages_once() -> None:
    found = why(report(), "body").splitlines()
    assert found[0] == "body keeps 36,864 bytes in 2 storages:"
    assert [line.split()[0] for line in found[1:4]] == ["body_1", "body_2_0", "body_2_1"]


def test_words_as_they_are_printed_and_the_tensors_as_csv() -> None:
    found = explained(report(), "body.2.1")
    assert_expected_inline(
        str(found),
        """\
body_2_1 (SiLU) saves a tensor: kept for the backward
  shape    [B, C1, H0, W0] float32, 32 bits an element
  bytes    18,432 = 4*B*C1*H0*W0
  pillar   activation: the activation's derivative is computed from its input or its result
  verdict  above: full precision and grows with C1
  to do    if it is piecewise linear, `floorplan rewrite` keeps one bit; a smooth one needs exact recomputation or a labelled lossy derivative
  where    C1 = 8 (width first seen at body.0)""",  # noqa: E501
    )
    assert found.csv().splitlines()[1].startswith('body_2_1,SiLU,activation,"[B, C1, H0, W0]",18432,')
    assert [t["bytes"] for t in found.as_json()["tensors"]] == [18432]


def test_refusals_are_told() -> None:
    assert "left alone" in why(report(rank=2), "body.2.1")


def test_a_node_that_keeps_nothing_is_no_error() -> None:
    assert why(report(rank=2), "mean") == "mean: autograd keeps nothing there"
    frozen = why(report(rank=2), "fc")
    assert "model state" in frozen and "kept for the backward" not in frozen


def test_an_unknown_name_gets_near_misses() -> None:
    with pytest.raises(FloorplanError, match=r"^bod.2: no node .*; try .*body\.2"):
        why(report(), "bod.2")
