"""Reports in every form: what a CSV has, what is printed, what Markdown needs escaped."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from floorplan.render import FORMS, Block, Cell, Report, Table, difference, nbytes, render, versions


@dataclass(frozen=True)
class Sample(Report):
    """Two tables, one of them empty; rows and columns that are not printed; words of every kind."""

    heading = "a net, sampled"
    several: bool = True

    def parts(self) -> Iterator[str | Table]:
        yield from ("sampled", "")
        rows = [
            [Cell("4|8", "> 4|8"), nbytes(12345), None, Cell(0.25, "0.3"), "hidden"],
            ["x, y", 7, 1000, 2.5, None],
            ["z", 0, 0, 0, "row"],
        ]
        header = ["schedule", "bytes", "rank", Cell("time (s)", "time"), "more"]
        yield Table("steps", header, rows, (1, 2, 3), "by size", "… and 1 more", shown=2, columns=4)
        if self.several:
            yield Table("none", ["schedule", "why"], [])
        yield Block("choice: 4\n  of 8")
        yield "note: done"

    def as_json(self) -> dict[str, Any]:
        return {"schema": "sample/1", "bytes": 12345}


def test_text_has_words_and_no_empty_table() -> None:
    assert_expected_inline(
        str(Sample()),
        """\
sampled

by size
schedule       bytes    rank    time
----------  --------  ------  ------
> 4|8       12,345 B       -     0.3
x, y               7   1,000     2.5
… and 1 more

choice: 4
  of 8
note: done""",
    )


def test_markdown_escapes_bars_and_keeps_blocks() -> None:
    assert_expected_inline(
        Sample().markdown(),
        """\
# a net, sampled

sampled

by size

| schedule   |    bytes |   rank |   time |
|------------|----------|--------|--------|
| > 4\\|8     | 12,345 B |      - |    0.3 |
| x, y       |        7 |  1,000 |    2.5 |

… and 1 more

```
choice: 4
  of 8
```
note: done
""",
    )


def test_a_csv_has_every_row_and_column_as_plain_values() -> None:
    assert_expected_inline(
        Sample().csv(),
        """\
table,schedule,bytes,rank,time (s),more,why
steps,4|8,12345,,0.25,hidden,
steps,"x, y",7,1000,2.5,,
steps,z,0,0,0,row,
""",
    )
    assert Sample(several=False).csv().startswith('schedule,bytes,rank,time (s),more\n4|8,12345,,0.25,hidden\n"x, y"')


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_rendered(form: str) -> None:
    text = render(Sample(), form)
    assert "12345" in text.replace(",", "") and FORMS[form].what
    if form == "json":
        assert json.loads(text) == Sample().as_json()
    if form == "csv":
        assert {len(row) for row in csv.reader(text.splitlines())} == {7}


def test_differences_are_predicted_less_measured() -> None:
    @dataclass(frozen=True)
    class Two:
        a: int
        b: int

    assert difference(Two(5, 1), Two(3, 2)) == {"a": 2, "b": -1}
    assert difference(Two(5, 1), None) is None and difference(None, Two(5, 1)) is None


def test_versions() -> None:
    assert versions()["torch"] == torch.__version__ and versions().keys() == {"floorplan", "torch"}
