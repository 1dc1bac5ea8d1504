"""Take the screenshots in docs/images, in Chromium, from a run's folder.

    python -m benchmarks.pool.page_pictures RUN                      docs/images/dashboard*.png
    python -m benchmarks.pool.page_pictures RUN --chat "QUESTION"    docs/images/chat-compare.png: two of the run's versions
    python -m benchmarks.pool.page_pictures RUN --dark --phone --out DIR    the dashboard, dark and on a phone

RUN is a finished run. For the dashboard, use one with a cheating worker (`benchmarks/trust/byzantine.py`).
Look at the pictures before you commit them. Needs `make browser`.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.common.machine import IMAGES
from benchmarks.common.process import serving

OUT = IMAGES
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 600_000  # a reply may take this long on a slow machine
VIEWS = ("overview", "timeline")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--chat", metavar="QUESTION")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    look = {"viewport": PHONE if arguments.phone else WIDE, "color_scheme": "dark" if arguments.dark else "light"}
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if arguments.chat:
            with serving("serve", arguments.run, "--port", "0", "--dir", folder) as (_, url):
                chat(browser, url, arguments.chat, look, arguments.out)
        else:
            with serving("dashboard", arguments.run, "--port", "0") as (_, url):
                for view in VIEWS:
                    dashboard(browser, url, view, look, arguments.out)
        browser.close()


def dashboard(browser: Any, url: str, view: str, look: dict[str, Any], out: Path) -> None:
    page = browser.new_page(**look)
    page.goto(f"{url}/#{view}")
    page.wait_for_selector("#view section")
    page.wait_for_timeout(1500)  # until the last responses are shown
    height = page.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": look["viewport"]["width"], "height": min(height, 1200)}
    page.screenshot(
        path=out / f"dashboard{'' if view == 'overview' else f'-{view}'}.png",
        **({} if view == "overview" else {"clip": clip}),
    )
    page.close()


def chat(browser: Any, url: str, question: str, look: dict[str, Any], out: Path) -> None:
    context = browser.new_context(base_url=url, bypass_csp=True, **look)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.goto("/")
    page.get_by_role("button", name="New here? Create an account").click()
    page.get_by_label("Name or email").fill("ada")
    page.get_by_label("Password").fill("correct horse battery")
    page.get_by_role("button", name="Create account").click()
    page.get_by_role("textbox", name="Message", exact=True).wait_for()
    page.get_by_role("button", name="Compare").click()
    say(page, question, 2)
    page.wait_for_timeout(500)
    page.screenshot(path=out / "chat-compare.png")
    context.close()


def say(page: Any, text: str, replies: int) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelectorAll('article.reply:not(.writing)').length === {replies}")


if __name__ == "__main__":
    main()
