"""The report: one file that needs nothing else and tells no secret."""

import base64
import hashlib
import json
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import USAGE, main
from shoal.watch.page.report import answers, bundle, page, write_page
from shoal.watch.run import FolderRun

from .browsing import Watched
from .conftest import MARKUP


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.found[-1][0] if self.found else "", data))


def written(folder: Path) -> Elements:
    elements = Elements()
    elements.feed(page(answers(FolderRun(folder))))
    return elements


def told(folder: Path) -> Any:
    """The answers in the page."""
    elements = written(folder)
    [text] = [text for tag, text in elements.texts if tag == "script" and text.startswith("{")]
    return json.loads(text)


def test_it_asks_no_network_and_its_policy_allows_only_its_own_scripts(finished: Path) -> None:
    elements = written(finished)
    places = [v for _, attributes in elements.found for k, v in attributes.items() if k in ("src", "href")]
    assert all(place and place.startswith(("data:image/", "#")) for place in places)
    [policy] = [a["content"] or "" for tag, a in elements.found if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "trusted-types 'none'" in policy
    for tag, text in elements.texts:
        if tag in ("script", "style") and text.strip() and not text.startswith("{"):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"sha256-{digest}" in policy


def test_it_holds_the_run_as_data(finished: Path) -> None:
    found = told(finished)
    assert found["/api/overview"]["overview"]["trained"] == 3 and len(found["/api/nodes"]["nodes"]) == 6
    assert {row["reason"] for row in found["/api/validation"]["rejected"]} == {"proof", "bounds"}
    assert "[sampling]" in found["/api/about"]["config"] and found["/api/about"]["audit"] is None
    assert found["/api/about"]["samples"][0]["completion"] == MARKUP
    assert MARKUP not in page(answers(FolderRun(finished)))


def test_it_tells_no_key_and_no_address(finished: Path) -> None:
    database = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    text = json.dumps(told(finished))
    for (key,) in database.execute("SELECT key FROM nodes"):
        assert key[:16] not in text
    assert "10.1.2.3" not in text and str(finished) not in text
    assert not re.search(r"\b[0-9a-f]{40}\b", re.sub(r"digest = [^ ]+", "", text))


def test_an_audit_beside_the_run_is_in_it(finished: Path) -> None:
    (finished / "audit.txt").write_text("the audit found no broken link <b>\n")
    try:
        assert told(finished)["/api/about"]["audit"] == "the audit found no broken link <b>"
    finally:
        (finished / "audit.txt").unlink()


def test_the_page_of_several_runs_is_written(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_page(finished, [finished], out)
    assert len(json.loads(re.findall(r'id="answers">(.*?)</script>', out.read_text())[0])["/api/curves"]["others"]) == 1


def test_a_folder_that_is_no_run_is_one_line_at_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path), "--out", str(tmp_path / "a.html")]) == USAGE
    assert f"no state.json in {tmp_path}" in capsys.readouterr().err


def test_no_import_and_no_export_is_left_in_its_script() -> None:
    script = bundle()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE) and "</script" not in script


@pytest.mark.slow
@pytest.mark.parametrize("view", ["overview", "timeline", "nodes", "validation", "about"])
def test_it_opens_from_disk(chromium: Any, finished: Path, tmp_path: Path, view: str) -> None:
    write_page(finished, [finished], tmp_path / "report.html")
    watched = Watched(chromium, f"file://{tmp_path / 'report.html'}")
    opened = watched.page
    opened.goto(f"{watched.url}#{view}")
    opened.wait_for_selector("#view section")
    assert opened.locator("#views a[aria-current=page]").inner_text().lower() == view
    assert watched.errors == [] and not any(one.startswith("http") for one in watched.asked)
    assert "owned" not in opened.title()
