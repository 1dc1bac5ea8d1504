"""Takes the pictures of the pages that docs/ shows, in Chromium, from a run's folder.

    python benchmarks/page_pictures.py RUN                      docs/images/dashboard*.png
    python benchmarks/page_pictures.py RUN --sites              docs/images/dashboard-sites.png, of a run over sites
    python benchmarks/page_pictures.py RUN --chat "QUESTION"    docs/images/chat-*.png, with two of the run's versions

RUN is a finished run, for the dashboard one with a cheating worker (`benchmarks/byzantine.py`).
Look at what it took before you commit it. Needs `make browser`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

OUT = Path(__file__).parent.parent / "docs" / "images"
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 600_000  # a reply on a slow machine
DASHBOARD = {  # by view: screens and themes, as they stand in the file's name
    "overview": ["", "-dark", "-phone", "-phone-dark"],
    "timeline": ["", "-dark", "-phone"],
    "nodes": ["-dark", "-phone"],
    "validation": [""],
}
SITES = {"sites": [""]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--chat", metavar="QUESTION")
    parser.add_argument("--sites", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if arguments.chat:
            with serving("serve", arguments.run, "--port", "0", "--dir", folder) as url:
                chat(browser, url, arguments.chat, arguments.out)
        else:
            with serving("dashboard", arguments.run, "--port", "0") as url:
                for view, looks in (SITES if arguments.sites else DASHBOARD).items():
                    for look in looks:
                        dashboard(browser, url, view, look, arguments.out)
        browser.close()


def dashboard(browser: Any, url: str, view: str, look: str, out: Path) -> None:
    screen, theme = PHONE if "phone" in look else WIDE, "dark" if "dark" in look else "light"
    path = out / f"dashboard{'' if view == 'overview' else f'-{view}'}{look}.png"
    page = browser.new_page(viewport=screen, color_scheme=theme)
    page.goto(f"{url}/#{view}")
    page.wait_for_selector("#view section")
    page.wait_for_timeout(1500)  # the last answers
    if view in ("timeline", "nodes", "sites"):
        height = page.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
        page.screenshot(path=path, clip={"x": 0, "y": 0, "width": screen["width"], "height": min(height, 1200)})
    else:
        page.screenshot(path=path)
    page.close()


def chat(browser: Any, url: str, question: str, out: Path) -> None:
    for theme in ("light", "dark"):
        for screen in (WIDE, PHONE):
            end = f"{theme}-{screen['width']}.png"
            context = browser.new_context(base_url=url, viewport=screen, color_scheme=theme, bypass_csp=True)
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            page.goto("/")
            page.get_by_role("heading", name="Welcome back").wait_for()
            page.screenshot(path=out / f"chat-login-{end}")
            page.get_by_role("button", name="New here? Create an account").click()
            page.get_by_label("Name or email").fill(f"ada-{theme}-{screen['width']}")
            page.get_by_label("Password").fill("correct horse battery")
            page.get_by_role("button", name="Create account").click()
            page.get_by_role("textbox", name="Message", exact=True).wait_for()
            page.screenshot(path=out / f"chat-new-{end}")
            say(page, question, 1)
            page.get_by_role("button", name="Proof").first.click()
            page.get_by_role("button", name="Recompute it").click()
            page.get_by_role("button", name="Verified").wait_for()
            page.wait_for_timeout(500)
            page.screenshot(path=out / f"chat-reply-{end}")
            if screen is PHONE:
                page.get_by_role("button", name="Open the sidebar").click()
            page.get_by_role("button", name="New chat").click()
            page.get_by_role("button", name="Compare").click()
            say(page, question, 2)
            page.wait_for_timeout(500)
            page.screenshot(path=out / f"chat-compare-{end}")
            context.close()


def say(page: Any, text: str, replies: int) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelectorAll('article.reply:not(.writing)').length === {replies}")


@contextmanager
def serving(command: str, *arguments: object) -> Iterator[str]:
    """The address of a server of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", command, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://127.0.0.1:" in line:
                address = "http://127.0.0.1:" + line.split("http://127.0.0.1:")[1].split()[0].rstrip("/")
            if command == "dashboard" or line.startswith("ready"):
                yield address
                break
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
