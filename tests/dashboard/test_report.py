"""The report: one file that needs nothing else and tells no secret."""

import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from matplotlib.image import imread

from shoal.dashboard.drawing import Bars, Chart, Line, bar_chart, line_chart
from shoal.dashboard.pictures import COLORS, draw
from shoal.dashboard.report import render, write_report
from shoal.dashboard.watched import WatchedFolder

from .conftest import MARKUP


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    return parser.tags


def test_it_has_no_script_and_asks_no_network(finished: Path) -> None:
    found = tags(render(WatchedFolder(finished)))
    assert not {"script", "img", "link", "iframe", "object", "form"} & {tag for tag, _ in found}
    assert not [
        name for _, attributes in found for name in attributes if name in ("src", "href") or name.startswith("on")
    ]
    policy = [attributes["content"] for tag, attributes in found if tag == "meta" and "content" in attributes]
    assert policy[0] and policy[0].startswith("default-src 'none'; style-src 'sha256-")


def test_it_holds_the_run(finished: Path) -> None:
    page = render(WatchedFolder(finished))
    for words in ("Is anyone cheating?", "Caught", "Contributions", "Rejected work", "[sampling]", "not audited yet"):
        assert words in page, words
    assert page.count("<figure>") == 8
    assert MARKUP not in page and "&lt;img src=x" in page


def test_it_tells_no_key_and_no_address(finished: Path) -> None:
    database = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    page = render(WatchedFolder(finished)).replace("sha256-", "")
    for (key,) in database.execute("SELECT key FROM nodes"):
        assert key[:16] not in page
    assert "10.1.2.3" not in page
    assert not re.search(r"\b[0-9a-f]{40}\b", re.sub(r"digest = \"[0-9a-f]+\"", "", page))


def test_an_audit_beside_the_run_is_in_it(finished: Path) -> None:
    (finished / "audit.txt").write_text("the audit found no broken link <b>\n")
    try:
        page = render(WatchedFolder(finished))
    finally:
        (finished / "audit.txt").unlink()
    assert "no broken link &lt;b&gt;" in page


def test_its_charts_are_written_beside_it_as_pictures(finished: Path, tmp_path: Path) -> None:
    size_bytes, pictures = write_report(WatchedFolder(finished), tmp_path / "report.html")
    assert len((tmp_path / "report.html").read_bytes()) == size_bytes
    names = {"reward", "entropy", "kl", "clipped", "age", "groups", "verdicts", "speed"}
    assert {picture.relative_to(tmp_path / "report").stem for picture in pictures} == names
    assert all(imread(picture).shape[:2] == (520, 1040) for picture in pictures)


def test_a_picture_holds_what_its_chart_holds(tmp_path: Path) -> None:
    """Colours of lines, dots and bars are found at the places that their values say."""
    bars = Chart("bars", "$bars", x=[5, 10], bars=[Bars("a", [1, 0], "bad"), Bars("b", [1, 4], "mist")])
    pixels = (imread(draw(bars, tmp_path / "bars.png"))[..., :3] * 255).round().astype(int)
    red, mist = (shares(pixels, color) for color in (COLORS["bad"], COLORS["mist"]))
    assert 3.5 < mist / red < 6.5  # 5 against 1, and the legend's patches
    lines = Chart(
        "lines", "lines", [Line("", [1, 2, 3], [0.1, None, 0.3], "accent"), Line("d", [1], [0.2], "ink", True)]
    )
    pixels = (imread(draw(lines, tmp_path / "lines.png"))[..., :3] * 255).round().astype(int)
    assert shares(pixels, COLORS["accent"]) > 100 and shares(pixels, COLORS["ink"]) > 20
    empty = imread(draw(Chart("empty", "empty"), tmp_path / "empty.png"))
    assert (empty[100:400, 300:700, :3] < 0.6).any()  # it says that there is nothing


def shares(pixels: Any, color: str) -> int:
    """How many pixels have this colour."""
    wanted = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return int((pixels == wanted).all(-1).sum())


def test_charts_escape_names_and_survive_gaps() -> None:
    drawn = line_chart("<b>", [Line("a&b", [1, 2, 3], [0.1, None, 0.3], "accent")])
    assert "<b>" not in drawn and "a&amp;b" in drawn and "nan" not in drawn.lower()
    assert "Nothing was recorded" in line_chart("empty", [])
    assert "Nothing was recorded" in bar_chart("empty", [1, 2], [Bars("none", [0, 0], "mist")])
    assert bar_chart("two", [1, 2], [Bars("a", [3, 0], "mist"), Bars("b", [1, 2], "bad")]).count("<rect") == 3
