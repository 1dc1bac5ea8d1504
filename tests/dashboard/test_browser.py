"""The page in a real browser, on a finished run with hostile texts. `make browser` installs what it needs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Serving

pytestmark = pytest.mark.slow
AXE = Path(__file__).parents[2] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"
WAIT_MS = 60_000
VIEWS = ["overview", "timeline", "nodes", "validation", "rollouts"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Chromium is not installed: make browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page, what it said on the console, and which servers it asked."""

    def __init__(self, browser: Any, url: str, *, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        self.page.set_default_timeout(WAIT_MS)
        self.url = url
        self.errors: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.add("/".join(request.url.split("/")[:3])))

    def open(self, view: str = "overview") -> Any:
        self.page.goto(f"{self.url}/#{view}")
        self.page.wait_for_selector("#view section")
        return self.page


def test_the_first_screen_holds_three_answers_and_six_charts(chromium: Any, finished: Path, serving: Serving) -> None:
    watched = Watched(chromium, serving(finished))
    page = watched.open()
    page.wait_for_selector(".member")
    assert page.locator(".answer").count() == 3 and page.locator(".card").count() == 6
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    assert page.locator(".answer.bad .said").inner_text() == "Caught"
    assert watched.errors == [] and watched.asked == {watched.url}


@pytest.mark.parametrize("view", VIEWS)
def test_no_text_of_others_becomes_markup(chromium: Any, finished: Path, serving: Serving, view: str) -> None:
    watched = Watched(chromium, serving(finished))
    page = watched.open(view)
    if view == "rollouts":
        page.locator("tr.pick a").first.click()
        page.wait_for_selector(".side")
    page.wait_for_load_state("domcontentloaded")
    assert "owned" not in page.title()
    assert page.locator("main img, main script").count() == 0
    assert watched.errors == [] and watched.asked == {watched.url}


def test_a_chart_can_be_read_by_keyboard(chromium: Any, finished: Path, serving: Serving) -> None:
    page = Watched(chromium, serving(finished)).open()
    page.locator(".card svg").first.focus()
    page.keyboard.press("End")
    assert page.locator(".tip:visible").inner_text().startswith("step 3")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".tip:visible").inner_text().startswith("step 2")
    page.keyboard.press("Escape")
    assert page.locator(".tip:visible").count() == 0


def test_a_rejection_is_explained(chromium: Any, finished: Path, serving: Serving) -> None:
    page = Watched(chromium, serving(finished)).open("validation")
    page.wait_for_selector(".reason")
    reason = page.locator(".reason", has_text="proof").first
    assert "another model" in reason.inner_text()
    reason.locator("a").click()
    page.wait_for_selector(".verdict.bad")
    assert "The worker's own signature proves it" in page.locator(".verdict").inner_text()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_the_screen(
    chromium: Any, finished: Path, serving: Serving, view: str, width: int
) -> None:
    page = Watched(chromium, serving(finished), width=width, height=844).open(view)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_is_kept(chromium: Any, finished: Path, serving: Serving) -> None:
    page = Watched(chromium, serving(finished)).open()
    page.locator("#theme").click()
    page.reload()
    page.wait_for_selector(".answer")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_lost_connection_is_said_and_found_again(chromium: Any, finished: Path, serving: Serving) -> None:
    watched = Watched(chromium, serving(finished))
    watched.page.route("**/api/events*", lambda route: route.abort())
    page = watched.open()
    page.wait_for_selector("#trouble:visible")
    assert page.locator(".answer").count() == 3  # the page keeps what it has
    page.unroute("**/api/events*")
    page.reload()
    page.wait_for_selector(".answer")
    page.wait_for_selector("#trouble", state="hidden")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(chromium: Any, finished: Path, serving: Serving, view: str, theme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make browser")
    page = Watched(chromium, serving(finished), theme=theme).open(view)
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    serious = [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []
