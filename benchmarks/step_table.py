"""The step benchmark's page from its results: what was asked and what is reached, then every net's rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

MB = 1e6
REFERENCE = 95.43  # MB, the MemFLoRA paper's device figure for MobileNetV2


@dataclass(frozen=True)
class Goal:
    """A requested peak and, with everything counted, a total in MB; a wall time over full fine-tuning's."""

    net: str
    peak: float
    time: float
    total: float = float("inf")

    def __str__(self) -> str:
        whole = f", in all ≤ {self.total:g} MB" if self.total < float("inf") else ""
        return f"peak ≤ {self.peak:g} MB{whole}, time ≤ {self.time:.2f}"


GOALS = (
    Goal("mobilenet_v2", 17.5, 0.80, 29),
    Goal("mobilenet_v2", 12.3, 0.90, 24),
    Goal("mobilenet_v2", 4.8, 1.10, 16),
    Goal("mobilenet_v2_224", 16.5, 0.70),
    Goal("resnet50", 41, 0.90),
    Goal("t_resnet", 2.3, 0.90),
)


@dataclass(frozen=True)
class Figures:
    """A row's finished cells; None where one is missing."""

    name: str
    made: dict[str, Any]
    cells: dict[str, Any]
    title: str = ""  # of its net

    def get(self, cell: str, key: str) -> Any:
        """One figure."""
        return self.cells.get(cell, {}).get(key)

    @property
    def peak(self) -> int | None:
        """Measured requested peak, bytes."""
        return self.get("memory", "measured")  # type: ignore[no-any-return]

    @property
    def total(self) -> int | None:
        """Peak, model, optimizer state and batch, bytes."""
        state = self.get("memory", "state")
        return None if self.peak is None else self.peak + sum(state.values())

    @property
    def part(self) -> int:
        """Smallest number of samples that run at once; 0: the whole batch."""
        m = self.made
        return min((n for n in (m["micro_batch"], m["last"], *(s for _, s in m["stages"])) if n), default=0)

    def numbers(self, cell: str) -> list[int]:
        """Thread counts that a cell was measured with."""
        return [int(k.split()[1]) for k, v in self.cells.items() if k.startswith(cell + " ") and "failed" not in v]


def rows_in(document: dict[str, Any], net: str) -> list[Figures]:
    """A net's rows."""
    found = document["nets"].get(net, {"rows": {}, "title": ""})
    return [Figures(name, r["made"], r["cells"], found["title"]) for name, r in found["rows"].items()]


def page(document: dict[str, Any]) -> str:
    """Markdown."""
    out = ["## What was asked, and what is reached", "", _goals(document), "", _exact(document), ""]
    for net, found in document["nets"].items():
        versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
        rows = rows_in(document, net)
        out += [f"## {found['title']}", "", f"`python benchmarks/step_program.py --net {net}`; {versions}.", ""]
        out += [_table(rows), "", *_failures(rows)]
    return "\n".join(out).rstrip()


def best(goal: Goal, rows: list[Figures]) -> Figures | None:
    """The compiled row that answers a goal: the fastest that fits, or the largest if none was timed; if none fits,
    the smallest."""
    compiled = [r for r in rows if r.made["kind"] == "compiled" and r.peak is not None and r.total is not None]
    fit = [r for r in compiled if r.peak <= goal.peak * MB and r.total <= goal.total * MB]  # type: ignore[operator]
    if timed := [r for r in fit if _wall(r) is not None]:
        return min(timed, key=lambda r: _wall(r) or 0.0)
    return max(fit, key=lambda r: r.peak or 0, default=min(compiled, key=lambda r: r.peak or 0, default=None))


def _wall(r: Figures) -> float | None:
    """The ratio of wall times at the most threads."""
    most = max(r.numbers("time"), default=0)
    return r.get(f"time {most}", "wall")  # type: ignore[no-any-return]


def _goals(document: dict[str, Any]) -> str:
    lines = []
    for goal in GOALS:
        r = best(goal, rows_in(document, goal.net))
        if r is None or r.peak is None or r.total is None:
            continue
        wall = _wall(r)
        fits = r.peak <= goal.peak * MB and r.total <= goal.total * MB
        verdict = "no" if not fits else "not timed" if wall is None else "yes" if wall <= goal.time else "no"
        title = document["nets"][goal.net]["title"]
        lines.append([title, goal, r.name.removeprefix("compiled, "), _mb(r.peak), _mb(r.total), _x(wall), verdict])
    header = ["net", "asked", "schedule", "peak, MB", "in all, MB", "wall time", "reached"]
    return _markdown(lines, header, "lllrrrl")


def _exact(document: dict[str, Any]) -> str:
    """What is asked of all rows at once, each with the worst of them."""
    rows = [r for net in document["nets"] for r in rows_in(document, net)]
    lines = []
    for what, limit, values in (
        ("predicted − measured peak, bytes", 0, _pairs(rows, _difference)),
        ("storages of the two timelines that differ in bytes, birth or death (rows)", 0, _pairs(rows, _unlike)),
        (
            "gradients against plain autograd, float64, of the largest",
            1e-12,
            _pairs(rows, lambda r: r.get("gradients", "error")),
        ),
        (
            "peak / whole-op bound, parts of 4 samples or more",
            1.02,
            _pairs([r for r in rows if r.part == 0 or r.part >= 4], bound_ratio),
        ),
        (
            "resident growth / requested peak, compiled, channels_last",
            1.2,
            _pairs([r for r in rows if r.made["kind"] == "compiled" and r.made["layout"] == "channels_last"], _growth),
        ),
    ):
        if values:
            worst, name = max(values)
            over = sum(v > limit for v, _ in values)
            lines.append([what, f"≤ {limit:g}", f"{worst:.3g} ({name})", len(values), over])
    return _markdown(lines, ["of all rows", "asked", "worst", "rows", "over"], "llrrr")


def _pairs(rows: list[Figures], value: Any) -> list[tuple[float, str]]:
    return [(v, f"{r.title}: {r.name}") for r in rows if (v := value(r)) is not None]


def _difference(r: Figures) -> int | None:
    predicted = r.get("memory", "predicted")
    return None if predicted is None else abs(predicted - r.get("memory", "measured"))


def _unlike(r: Figures) -> int | None:
    same = r.get("memory", "same")
    return None if same is None else int(not same)


def bound_ratio(r: Figures) -> float | None:
    """Requested peak over what its ops need if run whole."""
    bound = r.get("memory", "bound")
    return None if not bound or r.peak is None else r.peak / bound


def _growth(r: Figures) -> float | None:
    threads = max(r.numbers("resident"), default=0)
    grown = r.get(f"resident {threads}", "bytes")
    return None if grown is None or not r.peak else grown / r.peak


def _table(rows: list[Figures]) -> str:
    times = sorted({n for r in rows for n in r.numbers("time")}, reverse=True)
    clocks = [(n, clock) for n in times for clock in ("wall", "cpu")]
    header = [
        "step",
        "peak, MB",
        "predicted − measured, B",
        "in all, MB",
        "resident growth, MB",
        "growth / peak",
        "peak / whole-op bound",
        "gradient error",
    ]
    header += [f"{'CPU' if c == 'cpu' else c} time, {n} thread{'s' * (n > 1)}" for n, c in clocks]
    return _markdown([list(_cells(r, clocks)) for r in rows], header, "l" + "r" * (len(header) - 1))


def _cells(r: Figures, clocks: list[tuple[int, str]]) -> Iterator[str]:
    threads = max(r.numbers("resident"), default=0)
    predicted, error = r.get("memory", "predicted"), r.get("gradients", "error")
    yield r.name
    yield _mb(r.peak)
    yield "-" if predicted is None else f"{predicted - r.get('memory', 'measured')}"
    yield _mb(r.total)
    yield _mb(r.get(f"resident {threads}", "bytes"))
    yield _x(_growth(r))
    yield "-" if (bound := bound_ratio(r)) is None else f"{bound:.3f}"
    yield "-" if error is None else f"{error:.1e}"
    for n, clock in clocks:
        yield _x(r.get(f"time {n}", clock))


def _failures(rows: list[Figures]) -> list[str]:
    lines = [f"- {r.name}, {c}: {v['failed']}" for r in rows for c, v in r.cells.items() if "failed" in v]
    return ["Failed:", "", *lines, ""] if lines else []


def _mb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MB:.2f}"


def _x(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _markdown(lines: list[list[Any]], header: list[str], sides: str) -> str:
    rows = [[str(c).replace("|", "\\|") for c in line] for line in lines]
    align = [{"l": "left", "r": "right"}[s] for s in sides] if rows else None
    return str(tabulate(rows, header, "github", colalign=align, disable_numparse=True))
