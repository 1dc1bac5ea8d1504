"""Pages in a real browser. `make browser` installs Chromium, Playwright and axe-core. Tests skip without them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_MS = 60_000
AXE = Path(__file__).parents[3] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


@contextmanager
def launch_chromium() -> Iterator[Any]:
    """Launch Debian's Chromium. Skip the test if it is not installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed: make browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


def record_activity(page: Any) -> tuple[list[str], list[str]]:
    """Return two growing lists: the errors on a page's console, and the URLs it requests."""
    errors: list[str] = []
    urls: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    return errors, urls


def serious_violations(page: Any) -> list[str]:
    """Return axe-core's serious and critical findings."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make browser")
    page.evaluate(AXE.read_text())
    violations = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    serious = [violation for violation in violations if violation["impact"] in ("serious", "critical")]
    return [f"{violation['id']}: {violation['nodes'][0]['html'][:200]}" for violation in serious]


class Watched:
    """A page of the dashboard, its console errors, and the servers it contacts."""

    def __init__(self, browser: Any, url: str, *, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        self.page.set_default_timeout(WAIT_MS)
        self.url = url
        self.errors, self._urls = record_activity(self.page)

    @property
    def servers(self) -> set[str]:
        return {"/".join(url.split("/")[:3]) for url in self._urls}

    def open(self, view: str = "overview") -> Any:
        self.page.goto(f"{self.url}/#{view}")
        self.page.wait_for_selector("#view section")
        return self.page
