"""The chat page in a real Chromium: what a person does, and what the browser itself reports.

The first tests run by default where Chromium and Playwright are installed (`make browser`); the rest are slow.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import CHEAP, Running, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("Chromium is not installed: make browser", allow_module_level=True)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
PASSWORD = "correct horse battery"
DEADLINE_MS = 60_000
AXE = Path(__file__).parents[2] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"
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
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


class Visit:
    """A page with a person before it. What the browser complained about, and whom it asked, is kept."""

    def __init__(self, browser: Any, running: Running, **context: Any) -> None:
        self.running = running
        self.context = browser.new_context(base_url=running.url, **context)
        self.context.set_default_timeout(DEADLINE_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def enter(self, name: str) -> "Visit":
        self.page.goto("/")
        self.page.get_by_label("Name or email").fill(name)
        if (another := self.page.get_by_role("button", name="New here? Create an account")).is_visible():
            another.click()  # the first account has a page of its own
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.get_by_role("button", name="Create account").click()
        self.page.get_by_role("textbox", name="Message", exact=True).wait_for()
        return self

    def say(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def replies(self, count: int) -> Any:
        """The finished replies, once there are that many."""
        found = self.page.locator("article.reply:not(.writing)")
        sync_api.expect(found).to_have_count(count, timeout=DEADLINE_MS)
        return found

    def close(self) -> None:
        own = self.running.url
        assert [url for url in self.asked if not url.startswith((own, "blob:" + own))] == []
        assert self.complaints == []
        self.context.close()


@pytest.mark.slow
def test_register_chat_and_verify(browser: Any, run: Running) -> None:
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
    db = run.service.replies.conversations.db
    id = visit.page.url.rpartition("#")[2]
    row = db.execute("SELECT id, proof FROM message WHERE conversation = ? AND role = 'assistant'", (id,)).fetchone()
    changed = json.loads(row["proof"]) | {"text": "what the operator would rather have said"}
    db.execute("UPDATE message SET proof = ? WHERE id = ?", (json.dumps(changed), row["id"]))
    reply.get_by_role("button", name="Proof").click()
    reply.get_by_role("button", name="Recompute it").click()
    sync_api.expect(reply).to_contain_text("This is not what these weights, this prompt and this seed give.")
    sync_api.expect(reply.get_by_role("button", name="Verified")).to_have_count(0)
    visit.close()


def test_what_a_model_writes_never_runs(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("mallory")
    visit.say("hello")
    visit.replies(1)
    assert run.service.replies is not None
    db = run.service.replies.conversations.db
    id = visit.page.url.rpartition("#")[2]
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
    sync_api.expect(reply.locator("math")).to_have_count(2)  # drawn, the second without its link
    visit.close()


def test_the_browser_refuses_foreign_code(browser: Any, run: Running) -> None:
    visit = Visit(browser, run)
    visit.page.goto("/")
    refused = visit.page.evaluate(
        """async () => {
            const found = [];
            document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
            const script = document.createElement("script");
            try { script.text = "document.title = 'run'"; } catch { found.push("trusted types"); }
            try { document.body.innerHTML = "<b>"; } catch { found.push("innerHTML"); }
            const style = document.createElement("style");
            style.textContent = "body { color: red }";
            document.head.append(style);
            try { await fetch("https://example.com/"); } catch { found.push("fetch"); }
            await new Promise((resolve) => setTimeout(resolve, 100));
            return found;
        }"""
    )
    assert {"trusted types", "innerHTML", "fetch", "style-src-elem"} <= set(refused)
    visit.context.close()


@pytest.mark.slow
def test_stop_regenerate_edit_and_branch(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("brancher")
    page = visit.page
    visit.say("one")
    visit.replies(1)
    page.get_by_role("button", name="Regenerate the reply").click()
    sync_api.expect(page.locator("article.reply .switch")).to_have_text("2 / 2")
    page.get_by_role("button", name="Previous version").click()
    sync_api.expect(page.locator("article.reply .switch")).to_have_text("1 / 2")
    page.locator("article.said").hover()
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_role("textbox", name="Edit the message").fill("two")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("article.said .switch")).to_have_text("2 / 2")
    sync_api.expect(page.locator("article.said .bubble")).to_have_text("two")
    page.reload()
    sync_api.expect(page.locator("article.said .bubble")).to_have_text("two")
    page.locator("article.said").get_by_role("button", name="Previous version").click()
    sync_api.expect(page.locator("article.said .bubble")).to_have_text("one")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation").click()
    assert len(json.loads(Path(download.value.path()).read_text())["messages"]) == 5
    visit.close()


@pytest.mark.slow
def test_escape_stops_and_keeps_what_was_written(browser: Any, tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as running:
        assert running.service.versions.newest is not None
        running.service.versions.newest.eos_ids = ()  # it would go on for long
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
def test_two_versions_and_a_budget(browser: Any, run: Running) -> None:
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
def test_log_out_and_expiry_lead_back_to_the_login(browser: Any, run: Running) -> None:
    visit = Visit(browser, run).enter("leaver")
    visit.context.clear_cookies(name="shoal_session")  # as if it had expired
    visit.say("hello")
    visit.page.get_by_role("heading", name="Welcome back").wait_for()
    visit.page.get_by_label("Name or email").fill("leaver")
    visit.page.get_by_label("Password").fill(PASSWORD)
    visit.page.keyboard.press("Enter")
    visit.page.get_by_role("button", name="Log out").click()
    visit.page.get_by_role("heading", name="Welcome back").wait_for()
    visit.context.close()  # the refused request was a complaint


@pytest.mark.slow
def test_the_keyboard_alone_is_enough(browser: Any, run: Running) -> None:
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
def test_on_a_phone_nothing_is_cut_off_and_the_list_is_a_drawer(browser: Any, run: Running) -> None:
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
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make browser")
    visit = Visit(browser, run, color_scheme=scheme)
    visit.page.goto("/")
    visit.page.get_by_role("heading", name="Welcome back").wait_for()
    assert serious(visit.page) == []
    visit.enter(f"axe-{scheme}")
    assert serious(visit.page) == []
    visit.say("hello")
    reply = visit.replies(1).first
    reply.get_by_role("button", name="Proof").click()
    reply.get_by_role("button", name="Recompute it").click()
    reply.get_by_role("button", name="Verified").wait_for()
    assert serious(visit.page) == []
    visit.close()


def serious(page: Any) -> list[str]:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")
    ]
