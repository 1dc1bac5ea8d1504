"""The dashboard in a real browser, as the tests see it."""

from typing import Any

WAIT_MS = 60_000


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
