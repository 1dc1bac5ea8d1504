"""The report is one file that needs no other file and contains no secret."""

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
from shoal.watch.page.report import bundle, page, responses, write_page
from shoal.watch.run import FolderRun

from .browsing import Watched
from .conftest import MARKUP


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))


def report(folder: Path) -> Elements:
    elements = Elements()
    elements.feed(page(responses(FolderRun(folder))))
    return elements


def embedded(folder: Path) -> Any:
    """Return the responses embedded in the report."""
    [text] = [text for tag, text in report(folder).texts if tag == "script" and text.startswith("{")]
    return json.loads(text)


def test_a_report_uses_no_network_and_its_policy_allows_only_its_own_scripts(finished: Path) -> None:
    elements = report(finished)
    urls = [v for _, attributes in elements.tags for k, v in attributes.items() if k in ("src", "href")]
    assert all(url and url.startswith(("data:image/", "#")) for url in urls)
    [policy] = [a["content"] or "" for tag, a in elements.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "trusted-types 'none'" in policy
    for tag, text in elements.texts:
        if tag in ("script", "style") and text.strip() and not text.startswith("{"):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"sha256-{digest}" in policy


def test_a_report_holds_the_run_as_data(finished: Path) -> None:
    data = embedded(finished)
    assert data["/api/overview"]["overview"]["trained"] == 3 and len(data["/api/nodes"]["nodes"]) == 7
    assert {row["reason"] for row in data["/api/validation"]["rejected"]} == {"proof", "bounds"}
    assert "[sampling]" in data["/api/about"]["config"] and data["/api/about"]["audit"] is None
    assert data["/api/about"]["samples"][0]["completion"] == MARKUP
    assert MARKUP not in page(responses(FolderRun(finished)))


def test_a_report_contains_no_key_and_no_address(finished: Path) -> None:
    database = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    text = json.dumps(embedded(finished))
    for (key,) in database.execute("SELECT key FROM nodes"):
        assert key[:16] not in text
    assert "10.1.2.3" not in text and str(finished) not in text
    assert not re.search(r"\b[0-9a-f]{40}\b", re.sub(r"digest = [^ ]+", "", text))


def test_a_report_contains_the_audit_in_the_runs_folder(finished: Path) -> None:
    (finished / "audit.txt").write_text("no broken link <b>\n")
    try:
        assert embedded(finished)["/api/about"]["audit"] == "no broken link <b>"
    finally:
        (finished / "audit.txt").unlink()


def test_a_report_compares_several_runs(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_page(finished, [finished], out)
    assert (
        len(json.loads(re.findall(r'id="responses">(.*?)</script>', out.read_text())[0])["/api/curves"]["others"]) == 1
    )


def test_the_command_refuses_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path), "--out", str(tmp_path / "a.html")]) == USAGE
    assert f"no state.json in {tmp_path}" in capsys.readouterr().err


def test_the_script_of_a_report_has_no_import_and_no_export() -> None:
    script = bundle()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE) and "</script" not in script


@pytest.mark.slow
@pytest.mark.parametrize("view", ["overview", "timeline", "nodes", "validation", "about"])
def test_a_report_opens_from_disk(chromium: Any, finished: Path, tmp_path: Path, view: str) -> None:
    write_page(finished, [finished], tmp_path / "report.html")
    watched = Watched(chromium, f"file://{tmp_path / 'report.html'}")
    opened = watched.page
    opened.goto(f"{watched.url}#{view}")
    opened.wait_for_selector("#view section")
    assert opened.locator("#views a[aria-current=page]").inner_text().lower() == view
    assert watched.errors == [] and not any(server.startswith("http") for server in watched.servers)
    assert "owned" not in opened.title()
