"""The page is whole in itself, keeps hostile names as text, and holds the timeline as it is."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from timelines import NAMES, first_fit, recorded, step, timelines

from floorplan.errors import FloorplanError
from floorplan.timeline.bands import band_of, lasts
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.page import SCRIPTS, _asset, page

NODE = shutil.which("node")


class Reader(HTMLParser):
    """Elements, attributes and text of a page, as a browser parses it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = f"{tag}#{dict(attrs).get('id') or ''}"

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._inside, []).append(data)

    @property
    def data(self) -> dict[str, Any]:
        """The timelines in the page."""
        found: dict[str, Any] = json.loads("".join(self.texts["script#data"]))
        return found


@settings(deadline=None, max_examples=40)
@given(timelines())
def test_the_page_holds_the_timeline(t: StepTimeline) -> None:
    offsets = first_fit(t.blocks)
    read = Reader(page([t, step()], [offsets, None], t.name, [t.name]))
    line, words = read.data["lines"][0], read.data["strings"]
    placed = [(o, b) for o, b in zip(offsets, t.blocks, strict=True) if lasts(b)]
    assert (line["events"], line["peak"], line["peakAt"]) == (t.events, t.peak, t.peak_at)
    for column, name in (("born", "born"), ("died", "died"), ("bytes", "nbytes")):
        assert line[column] == [getattr(b, name) for _, b in placed]
    assert line["offset"] == [o for o, _ in placed] and read.data["lines"][1]["offset"] is None
    assert [read.data["bands"][i]["name"] for i in line["band"]] == [band_of(b) for _, b in placed]
    assert [words[i] for i in line["node"]] == [b.node.replace("\udc80", "?") for _, b in placed]
    assert line["arena"] == max((o + b.nbytes for o, b in placed), default=0)
    assert [tag for tag, _ in read.tags].count("script") == 2  # whatever the names say


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_text(name: str) -> None:
    html = page([StepTimeline(name, (), 0, ((name, 1),))], None, name, [name])
    assert "alert(1)</script>" not in html
    html.encode()
    read = Reader(html)
    assert read.texts.get("title#", [""]) == ([name.replace("\udc80", "?")] if name else [""])


def test_nothing_is_fetched_and_only_its_own_script_runs() -> None:
    html = page([step()], None, "a page")
    read = Reader(html)
    assert not [a for _, attrs in read.tags for a in attrs if a in ("src", "href", "style") or a.startswith("on")]
    assert {tag for tag, _ in read.tags}.isdisjoint(("link", "img", "iframe", "object", "base", "form"))
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(", html)
    policy = next(a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    for kind, content in (("style", read.texts["style#"]), ("script", read.texts["script#"])):
        digest = base64.b64encode(hashlib.sha256("".join(content).encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")


def test_figures_can_be_read_without_scripts() -> None:
    t = step()
    before = StepTimeline("before", (*t.blocks, t.blocks[0], t.blocks[2]), t.events, t.state)
    html = page([before, t], [None, [0, 3_000_000, 3_000_000, 9_000_000]], "two").replace("\N{NO-BREAK SPACE}", " ")
    for figure in (
        "18.00 MB",
        "9.00 MB</b> (2.0× less)",
        "backward of conv1",
        "33.3 % of the peak",
        "9.00 MB<small>1.0002 × the peak",
        "model 4.0 kB, optimizer 8.0 kB",
        "<b>9.01 MB</b>",
    ):
        assert figure in html
    assert 'class="summary c6"' in html


def test_refusals() -> None:
    with pytest.raises(FloorplanError, match="no timeline to show"):
        page([], None, "none")
    with pytest.raises(FloorplanError, match="1 layouts for 2 timelines"):
        page([step(), step()], [None], "two")
    with pytest.raises(FloorplanError, match="3 offsets for 4 blocks"):
        page([step()], [[0, 1, 2]], "short")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name: str) -> None:
    subprocess.run([str(NODE), "--check", "-"], input=_asset(name), text=True, check=True)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_page_reckons_as_the_timeline_does() -> None:
    """The script's own sums, lists and hit tests, run outside a browser."""
    t = recorded()
    offsets = first_fit(t.blocks)
    data = Reader(page([t], [offsets], "real")).data
    program = (
        _asset("model.js")
        + """
      const data = JSON.parse(require("fs").readFileSync(0, "utf8")), raw = data.lines[0];
      const line = new Line(raw, data.strings, data.bands), events = Array.from(Array(raw.events).keys());
      const middle = i => line.at((line.born[i] + line.died[i]) / 2, line.offset[i] + line.bytes[i] / 2, 1e-6, 1e-6);
      console.log(JSON.stringify({
        total: Array.from(line.total.slice(0, raw.events)),
        alive: events.map(e => line.alive(e).map(i => line.bytes[i])),
        hits: raw.born.map((_, i) => middle(i)), moments: events.map(e => line.moment(e)),
        amounts: [999, 1000, 999949, 999950, 84e6].map(formatBytes)}));
    """
    )
    run = subprocess.run([str(NODE), "-e", program], input=json.dumps(data), capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["total"] == list(t.live) and max(found["total"]) == t.peak
    assert found["alive"] == [[b.nbytes for b in t.alive(e) if b.nbytes] for e in range(t.events)]
    assert found["hits"] == list(range(len(found["hits"])))
    assert found["moments"][t.peak_at].startswith("backward")
    assert found["amounts"] == ["999 B", "1.0 kB", "999.9 kB", "1.00 MB", "84.00 MB"]
