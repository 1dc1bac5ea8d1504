"""The chat page in a real Chromium: the tests act as a user and check what the browser reports.

The two security tests run by default if Chromium and Playwright are installed (`make browser`). The others are marked
slow.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.watch.page.browsing import WAIT_MS, launch_chromium, record_activity, serious_violations

from .support import CHEAP, PASSWORD, Running, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make browser")
HOSTILE = (
    "so $x^2$ and $\\href{javascript:document.title=1}{y}$\n\n"
    '<img src=x onerror="document.title=1"><script>document.title=1</script>\n\n[x](javascript:document.title=1)\n\n'
    "```html\n<svg onload=document.title=1>\n```\n<think><iframe srcdoc='<script>top.document.title=1</script>'>"
)


@pytest.fixture(scope="module")
def run(run_folder: Path) -> Iterator[Running]:
    with serving(run_folder, run_folder / "serve", hasher=CHEAP) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_chromium() as browser:
        yield browser


class Visit:
    """The chat page in a browser context of its own. Console errors and requested URLs are recorded."""

    def __init__(self, browser: Any, running: Running, **context: Any) -> None:
        self.running = running
        self.context = browser.new_context(base_url=running.url, **context)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.errors, self.urls = record_activity(self.page)

    def enter(self, name: str) -> "Visit":
        self.page.goto("/")
        self.page.get_by_label("Name or email").fill(name)
        if (register := self.page.get_by_role("button", name="New here? Create an account")).is_visible():
            register.click()  # the page does not show this button before the first account exists
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.get_by_role("button", name="Create account").click()
        self.page.get_by_role("textbox", name="Message", exact=True).wait_for()
        return self

    def say(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def replies(self, count: int) -> Any:
        """Wait for this many finished replies and return them."""
        replies = self.page.locator("article.reply:not(.writing)")
        sync_api.expect(replies).to_have_count(count, timeout=WAIT_MS)
        return replies

    @property
    def conversation(self) -> str:
        return str(self.page.url.rpartition("#")[2])

    def close(self) -> None:
        """Check that the page contacted only its own server and logged no error, then close the browser context."""
        own = self.running.url
        assert [url for url in self.urls if not url.startswith((own, "blob:" + own))] == []
        assert self.errors == []
        self.context.close()


@pytest.mark.slow
def test_a_user_can_register_chat_and_verify_a_reply(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("ada")
    visit.say("one and two")
    reply = visit.replies(1).first
    reply.get_by_role("button", name="Proof").click()
    reply.get_by_role("button", name="Recompute it").click()
    reply.get_by_role("button", name="Verified").wait_for()
    sync_api.expect(reply).to_contain_text("whether the text is true.")
    visit.close()


@pytest.mark.slow
def test_a_tampered_reply_is_refused_on_the_page(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("tamperer")
    visit.say("one and two")
    reply = visit.replies(1).first
    assert run.service.replies is not None
    db, id = run.service.replies.conversations.db, visit.conversation
    row = db.execute("SELECT id, proof FROM message WHERE conversation = ? AND role = 'assistant'", (id,)).fetchone()
    changed = json.loads(row["proof"]) | {"text": "what the operator prefers"}
    db.execute("UPDATE message SET proof = ? WHERE id = ?", (json.dumps(changed), row["id"]))
    reply.get_by_role("button", name="Proof").click()
    reply.get_by_role("button", name="Recompute it").click()
    sync_api.expect(reply).to_contain_text("This is not what these weights, this prompt and this seed give.")
    sync_api.expect(reply.get_by_role("button", name="Verified")).to_have_count(0)
    visit.close()


def test_text_of_a_model_never_runs_as_code(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("mallory")
    visit.say("hello")
    visit.replies(1)
    assert run.service.replies is not None
    db, id = run.service.replies.conversations.db, visit.conversation
    db.execute("UPDATE message SET content = ? WHERE conversation = ?", (HOSTILE, id))
    db.execute("UPDATE conversation SET title = '<img src=x onerror=alert(1)>' WHERE id = ?", (id,))
    visit.page.reload()
    reply = visit.replies(1).first
    sync_api.expect(reply).to_contain_text("<script>document.title=1</script>")
    assert visit.page.title() == "<img src=x onerror=alert(1)> · Shoal"
    assert (
        visit.page.locator(".thread img, .thread script, .thread iframe, .thread svg:not(.icon), [onerror]").count()
        == 0
    )
    assert visit.page.locator("a[href^=javascript]").count() == 0
    sync_api.expect(reply.locator("math")).to_have_count(2)  # both formulas are shown, but the second is no link
    visit.close()


def test_the_browser_refuses_injected_code(browser: Any, run: Running) -> None:
    visit = Visit(browser, run)
    visit.page.goto("/")
    refused = visit.page.evaluate(
        """async () => {
            const refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            const script = document.createElement("script");
            try { script.text = "document.title = 'run'"; } catch { refused.push("trusted types"); }
            try { document.body.innerHTML = "<b>"; } catch { refused.push("innerHTML"); }
            const style = document.createElement("style");
            style.textContent = "body { color: red }";
            document.head.append(style);
            try { await fetch("https://example.com/"); } catch { refused.push("fetch"); }
            await new Promise((resolve) => setTimeout(resolve, 100));
            return refused;
        }"""
    )
    assert {"trusted types", "innerHTML", "fetch", "style-src-elem"} <= set(refused)
    visit.context.close()


@pytest.mark.slow
def test_a_user_can_regenerate_edit_switch_branches_and_export(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("brancher")
    page = visit.page
    visit.say("one")
    visit.replies(1)
    page.get_by_role("button", name="Regenerate the reply").click()
    sync_api.expect(page.locator("article.reply .switch")).to_have_text("2 / 2")
    page.get_by_role("button", name="Previous version").click()
    sync_api.expect(page.locator("article.reply .switch")).to_have_text("1 / 2")
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_role("textbox", name="Edit the message").fill("two")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("article.user .switch")).to_have_text("2 / 2")
    sync_api.expect(page.locator("article.user .bubble")).to_have_text("two")
    page.reload()
    sync_api.expect(page.locator("article.user .bubble")).to_have_text("two")
    page.locator("article.user").get_by_role("button", name="Previous version").click()
    sync_api.expect(page.locator("article.user .bubble")).to_have_text("one")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation").click()
    assert len(json.loads(Path(download.value.path()).read_text())["messages"]) == 5
    visit.close()


@pytest.mark.slow
def test_escape_stops_a_reply_and_keeps_its_text(browser: Any, tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as running:
        assert running.service.versions.newest is not None
        running.service.versions.newest.eos_ids = ()  # without end tokens, the reply is long
        step = running.service.scheduler._step
        running.service.scheduler._step = lambda: (step(), time.sleep(0.05))
        visit = Visit(browser, running).enter("stopper")
        visit.say("a very long story")
        visit.page.locator("article.reply.writing .prose").wait_for()
        visit.page.keyboard.press("Escape")
        sync_api.expect(visit.replies(1).first).to_contain_text("Stopped")
        sync_api.expect(visit.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        visit.close()


@pytest.mark.slow
def test_two_versions_reply_side_by_side_with_a_token_budget(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("comparer")
    page = visit.page
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("combobox", name="Second version").select_option("steps@0")
    page.get_by_text("8", exact=True).click()
    visit.say("1 + 1")
    replies = visit.replies(2)
    sync_api.expect(replies.nth(0).locator("header")).to_have_text("Version 3")
    sync_api.expect(replies.nth(1).locator("header")).to_have_text("Before training")
    sync_api.expect(replies.nth(0).locator(".budget")).to_contain_text("of 8 tokens")
    replies.nth(0).get_by_role("button", name="Continue with this").click()
    visit.say("2 + 2")
    visit.replies(4)
    visit.close()


@pytest.mark.slow
def test_an_expired_session_and_logging_out_lead_to_the_login(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("leaver")
    visit.context.clear_cookies(name="shoal_session")  # as if it had expired
    visit.say("hello")
    visit.page.get_by_role("heading", name="Welcome back").wait_for()
    visit.page.get_by_label("Name or email").fill("leaver")
    visit.page.get_by_label("Password").fill(PASSWORD)
    visit.page.keyboard.press("Enter")
    visit.page.get_by_role("button", name="Log out").click()
    visit.page.get_by_role("heading", name="Welcome back").wait_for()
    visit.context.close()  # `visit.close()` would fail, because the refused request is a console error


@pytest.mark.slow
def test_the_page_works_with_the_keyboard_alone(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("typist")
    page = visit.page
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    visit.replies(1)
    badge = page.get_by_role("button", name="Proof")
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if badge.evaluate("element => element === document.activeElement"):
            break
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("button", name="Recompute it")).to_be_visible()
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.type") == "search"
    visit.close()


@pytest.mark.slow
def test_on_a_phone_nothing_is_cut_off_and_the_sidebar_is_a_drawer(browser: Any, run: Running) -> None:
    visit = Visit(browser, run, viewport={"width": 390, "height": 844}, has_touch=True).enter("phone")
    page = visit.page
    visit.say("a rather long message with " + "x" * 200)
    visit.replies(1)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.get_by_role("button", name="Open the sidebar").click()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("heading", name="Talk to steps").wait_for()
    visit.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, run: Running, scheme: str) -> None:
    visit = Visit(browser, run, color_scheme=scheme)
    visit.page.goto("/")
    visit.page.get_by_role("heading", name="Welcome back").wait_for()
    assert serious_violations(visit.page) == []
    visit.enter(f"axe-{scheme}")
    assert serious_violations(visit.page) == []
    visit.say("hello")
    reply = visit.replies(1).first
    reply.get_by_role("button", name="Proof").click()
    reply.get_by_role("button", name="Recompute it").click()
    reply.get_by_role("button", name="Verified").wait_for()
    assert serious_violations(visit.page) == []
    visit.close()
