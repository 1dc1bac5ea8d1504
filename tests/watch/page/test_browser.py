"""The dashboard in a real browser, on a finished run with hostile texts. `make browser` installs Chromium."""

from pathlib import Path
from typing import Any

import pytest

from .browsing import Watched, serious_violations
from .conftest import Serving

pytestmark = pytest.mark.slow
VIEWS = ["overview", "timeline", "nodes", "validation", "about"]


def test_the_first_screen_holds_three_answers_and_six_charts(chromium: Any, finished: Path, serving: Serving) -> None:
    watched = Watched(chromium, serving(finished))
    page = watched.open()
    page.wait_for_selector(".member")
    assert page.locator(".answer").count() == 3 and page.locator(".card").count() == 6
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    assert page.locator(".answer.bad .headline").inner_text() == "Caught"
    assert watched.errors == [] and watched.servers == {watched.url}


@pytest.mark.parametrize("view", VIEWS)
def test_reported_text_never_becomes_markup(chromium: Any, finished: Path, serving: Serving, view: str) -> None:
    watched = Watched(chromium, serving(finished))
    page = watched.open(view)
    page.wait_for_load_state("domcontentloaded")
    assert "owned" not in page.title()
    assert page.locator("main img, main script").count() == 0
    assert watched.errors == [] and watched.servers == {watched.url}


def test_curves_of_another_run_are_drawn_too(chromium: Any, finished: Path, serving: Serving) -> None:
    watched = Watched(chromium, serving(finished, compare=[finished]))
    page = watched.open()
    card = page.locator(".card", has_text="Reward and held-out accuracy")
    assert card.locator("path.line.c-faint.thin").count() == 1
    assert card.locator("circle.ring.c-faint").count() == card.locator("circle.dot.c-ink").count() > 0
    assert page.locator("#run").inner_text() in card.locator(".legend").inner_text()
    assert watched.errors == []


def test_the_timeline_shows_downloads(chromium: Any, finished: Path, serving: Serving) -> None:
    watched = Watched(chromium, serving(finished))
    page = watched.open("timeline")
    page.get_by_role("button", name="1h 00m").click()
    download = page.locator("rect.b-receive")
    assert "alice receives 1 KiB of version 1" in (download.first.get_attribute("aria-label") or "")


def test_the_values_of_a_chart_can_be_read_with_the_keyboard(chromium: Any, finished: Path, serving: Serving) -> None:
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
    assert "The model may be another one" in reason.inner_text()


@pytest.mark.parametrize("width", [390, 1440])
def test_the_learners_sites_are_shown_if_it_has_any(
    chromium: Any, finished: Path, two_sites: Path, serving: Serving, width: int
) -> None:
    assert Watched(chromium, serving(finished)).open().locator("#views a", has_text="Sites").count() == 0
    watched = Watched(chromium, serving(two_sites), width=width, height=844)
    page = watched.open("sites")
    assert page.locator("#views a[aria-current=page]").inner_text() == "Sites"
    rows = page.locator("tbody tr")
    assert rows.count() == 2 and "missing" in page.locator("tr", has_text="<img").inner_text()
    assert "50 %" in page.locator("tr", has_text="site-0").inner_text()
    page.wait_for_selector(
        "path.line.c-ink", state="attached"
    )  # not "visible", because horizontal lines have no height
    assert page.locator(".plot path.line").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "owned" not in page.title() and page.locator("main img, main script").count() == 0
    assert watched.errors == [] and watched.servers == {watched.url}


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_the_screen(
    chromium: Any, finished: Path, serving: Serving, view: str, width: int
) -> None:
    page = Watched(chromium, serving(finished), width=width, height=844).open(view)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_is_kept_after_a_reload(chromium: Any, finished: Path, serving: Serving) -> None:
    page = Watched(chromium, serving(finished)).open()
    page.locator("#theme").click()
    page.reload()
    page.wait_for_selector(".answer")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_lost_connection_is_shown_until_it_is_back(chromium: Any, finished: Path, serving: Serving) -> None:
    watched = Watched(chromium, serving(finished))
    page = watched.open()
    page.route("**/api/overview", lambda route: route.abort())
    page.wait_for_selector("#notice:visible")
    assert page.locator(".answer").count() == 3  # the page still shows its data
    page.unroute("**/api/overview")
    page.wait_for_selector("#notice", state="hidden")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(chromium: Any, finished: Path, serving: Serving, view: str, theme: str) -> None:
    page = Watched(chromium, serving(finished), theme=theme).open(view)
    assert serious_violations(page) == []
