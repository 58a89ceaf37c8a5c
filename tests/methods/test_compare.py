"""`compare`: predicted beside measured for every method, in every format; pictures."""

import csv
import io
import json
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import floorplan
import floorplan.methods
from floorplan.errors import FloorplanError
from floorplan.graph.trace import Traced
from floorplan.ledger.inputs import filled
from floorplan.methods import rewrite
from floorplan.methods.compare import Comparison, compare

torch.manual_seed(0)


def pooled() -> nn.Module:
    """A 1-D net with max-pooling that no method was made for."""
    return nn.Sequential(
        nn.Conv1d(6, 16, 5, padding=2),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Dropout(0.2),
        nn.Conv1d(16, 24, 3, padding=1),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


ALL = [m for m in floorplan.methods.catalogue.METHODS if not m.startswith("tinytl")]


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(pooled(), torch.randn(2, 6, 40), methods=ALL, ranks=(2, 3), batches=(1, 4), measured=True)


def test_predicted_is_measured_for_every_method(found: Comparison) -> None:
    rows = [r for r in found.rows if r.predicted is not None]
    assert {r.method for r in rows} == set(ALL)
    for r in rows:
        assert r.difference is not None and not any(r.difference.values()), (r.method, r.difference)


def test_ranks_multiply_only_ranked_methods(found: Comparison) -> None:
    keys = [(r.method, r.rank, r.batch) for r in found.rows]
    assert keys.count(("full", None, 4)) == 1 and ("memflora", 3, 4) in keys
    by = {k: r for k, r in zip(keys, found.rows, strict=True)}
    full, ours = by["full", None, 4], by["memflora", 2, 4]
    assert ours.predicted.saved < full.predicted.saved / 10
    assert ours.predicted.optimizer == 8 * ours.predicted.trainable_parameters
    assert 0.6 * full.macs_paper < ours.macs_paper < full.macs_paper
    assert set(ours.macs) == {"forward", "backward"}


def test_formats_hold_the_same_rows(found: Comparison) -> None:
    header, *lines = csv.reader(io.StringIO(found.csv()))
    rows = [r for r in found.rows if r.predicted]
    assert len(lines) == len(rows) and header[:4] == ["method", "rank", "batch", "saved"]
    assert [int(x[3]) for x in lines] == [r.predicted.saved for r in rows]
    document = json.loads(json.dumps(found.as_json()))
    assert document["schema"] == "floorplan.compare/1"
    assert [r["predicted"]["saved"] for r in document["rows"]] == [r.predicted.saved for r in rows]
    assert str(found).count("\n") < found.markdown().count("\n") and "| memflora " in found.markdown()


def test_a_comparison_as_it_is_printed() -> None:
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 38, 3))
    found = compare(model, torch.randn(2, 6, 40), methods=("full", "bn", "memflora"), batches=(8,), measured=True)
    assert_expected_inline(
        str(found),
        """\
method      rank    batch    saved    saved, once per op    training-state peak    requested peak    optimizer    trainable    MACs (paper)    MACs (own)    predicted - measured
--------  ------  -------  -------  --------------------  ---------------------  ----------------  -----------  -----------  --------------  ------------  ----------------------
full           -        8    9,828                27,396                 26,192            32,948        8,536        1,067         153,216       109,440                       0
memflora       2        8    2,964                 3,124                  7,948            22,616          384           48         121,152        77,088                       0

bytes; one step, loss cross_entropy; multiply-adds of one step
not run: bn: Sequential: method norm: the model has no such parameter to train""",  # noqa: E501
    )


def test_a_method_without_a_place_is_listed_with_its_reason() -> None:
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 38, 3))
    found = compare(model, torch.randn(2, 6, 40), methods=("full", "bn"))
    assert [bool(r.refused) for r in found.rows] == [False, True]
    assert "not run: bn: " in str(found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": ("full", "lora")}, "method lora: not known"),
        ({"loss": "hinge"}, "--loss hinge: not known"),
        ({"batches": (0,)}, "not a positive number"),
        ({"methods": ("bn",)}, "no method could be run"),
    ],
)
def test_what_cannot_be_compared_is_said(options: dict[str, object], says: str) -> None:
    with pytest.raises(FloorplanError, match=says):
        compare(nn.Sequential(nn.Conv1d(6, 8, 3), nn.Flatten(), nn.Linear(304, 3)), torch.randn(2, 6, 40), **options)


def test_resized_inputs_keep_their_kinds() -> None:
    x, y, n = filled((torch.randn(2, 3), torch.tensor([[5], [7]]), 4), 6)
    assert x.shape == (6, 3) and y.tolist() == [[5]] * 6 and n == 4


def test_one_method_that_fails_costs_only_its_own_row() -> None:
    pool = nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), pool, nn.Conv2d(8, 4, 1), nn.Flatten())
    found = compare(model, torch.randn(2, 3, 8, 8), methods=("memflora", "memflora-bnr"), batches=(1, 1), sites="all")
    assert [bool(r.refused) for r in found.rows] == [False, True]
    assert "not run: memflora-bnr at rank 2: at batch 1: " in str(found)


def test_the_model_is_traced_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = rewrite.trace, list[nn.Module]()

    def trace(model: nn.Module, *args: Any, **options: Any) -> Traced:
        calls.append(model)
        return real(model, *args, **options)

    monkeypatch.setattr(rewrite, "trace", trace)
    table = compare(pooled(), torch.randn(2, 6, 40), methods=("full", "bias", "memflora"), ranks=(2, 3), batches=(2,))
    assert [r.refused for r in table.rows] == [""] * 4 and len(calls) == 1
