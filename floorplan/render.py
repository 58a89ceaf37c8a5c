"""Reports: what a command returns, as text, Markdown, CSV or JSON. Another form is one more entry of FORMS."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from tabulate import tabulate


class Cell(NamedTuple):
    """A value that is printed in words of its own; a CSV has the value."""

    value: Any
    text: str


def nbytes(n: int) -> Cell:
    """An amount with its unit."""
    return Cell(n, f"{n:,} B")


class Block(str):
    """Lines that stay as they are set, in Markdown too."""


@dataclass(frozen=True)
class Table:
    """Rows of plain values; a whole number is printed with commas, None as "-"."""

    name: str  # tells the tables of one CSV apart
    header: Sequence[Any]  # words; a Cell where a CSV has others
    rows: Sequence[Sequence[Any]]
    right: Sequence[int] = ()  # columns of numbers
    title: str = ""
    foot: str = ""
    shown: int | None = None  # rows that are printed; a CSV has all
    columns: int | None = None  # columns that are printed


def difference(predicted: Any, measured: Any) -> dict[str, int] | None:
    """Predicted less measured, each figure of two dataclasses; None where one is missing."""
    if predicted is None or measured is None:
        return None
    real = asdict(measured)
    return {k: v - real[k] for k, v in asdict(predicted).items()}


class Report(Protocol):
    """A command's result: what it prints, top to bottom, and its versioned document."""

    heading: ClassVar[str]  # of the Markdown: a format of the report itself

    def parts(self) -> Iterable[str | Table]:
        """Lines and tables; a table without rows is not printed."""

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`: plain data, with its schema's name."""

    def __str__(self) -> str:
        return render(self, "text")

    def markdown(self) -> str:
        """The report as Markdown."""
        return render(self, "markdown")

    def csv(self) -> str:
        """The report's tables as comma-separated values."""
        return render(self, "csv")


def render(report: Report, form: str) -> str:
    """The whole report in one of FORMS."""
    return FORMS[form].of(report)


def draw(table: Table, style: str = "simple") -> str:
    """A table alone, in one of tabulate's styles."""
    header = [_text(h, style) for h in table.header[: table.columns]]
    rows = [[_text(c, style) for c in row[: table.columns]] for row in table.rows[: table.shown]]
    align = ["right" if i in table.right else "left" for i in range(len(header))]
    return str(tabulate(rows, headers=header, tablefmt=style, colalign=align, disable_numparse=True))


def _text(value: Any, style: str) -> str:
    if isinstance(value, Cell):
        value = value.text
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", r"\|") if style == "github" else text


def _lines(report: Report, style: str) -> Iterator[str]:
    for part in report.parts():
        if isinstance(part, Block) and style == "github":
            yield from ("```", part, "```")
        elif isinstance(part, str):
            yield part
        elif part.rows[: part.shown]:
            words = filter(None, (part.title, draw(part, style), part.foot))
            yield from (("\n\n" if style == "github" else "\n").join(words), "")


def _plain(cell: Any) -> Any:
    return cell.value if isinstance(cell, Cell) else cell


def _csv(report: Report) -> str:
    tables = [p for p in report.parts() if isinstance(p, Table)]
    keys = [["table", *map(_plain, t.header)] for t in tables]
    header = list(dict.fromkeys(k for own in keys for k in own))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header[len(tables) == 1 :], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for table, own in zip(tables, keys, strict=True):
        writer.writerows(dict(zip(own, [table.name, *map(_plain, row)], strict=True)) for row in table.rows)
    return buffer.getvalue()


class Form(NamedTuple):
    """One way to write a report."""

    what: str  # for an option's help
    of: Callable[[Report], str]


FORMS = {
    "text": Form("it as it is printed", lambda r: "\n".join(_lines(r, "simple"))),
    "json": Form("the whole report as JSON", lambda r: json.dumps(r.as_json(), indent=1)),
    "csv": Form("its tables as CSV: plain numbers, a column `table` if there are several", _csv),
    "markdown": Form("it as Markdown", lambda r: "\n".join([f"# {r.heading.format(r)}", "", *_lines(r, "github"), ""])),
}


def versions() -> dict[str, str]:
    """What the figures were made with."""
    try:
        own = version("floorplan-torch")
    except PackageNotFoundError:
        own = "source"
    return {"floorplan": own, "torch": torch.__version__}
