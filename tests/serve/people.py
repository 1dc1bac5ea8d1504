"""A person at the page, as a browser would send it."""

import json
from typing import Any

import httpx

from .support import Running

PASSWORD = "correct horse battery"


class Person:
    def __init__(self, running: Running, name: str = "ada") -> None:
        self.name = name
        self.model = running.model
        self.http = running.client(headers={"Origin": running.url})
        self.csrf = ""

    def enter(self, route: str = "register", password: str = PASSWORD) -> httpx.Response:
        response = self.http.post(f"/chat/{route}", json={"name": self.name, "password": password})
        self.csrf = response.json().get("csrf", "")
        return response

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        headers = {"X-CSRF-Token": self.csrf} | more.pop("headers", {})
        return self.http.post(f"/chat/{path}", json={} if body is None else body, headers=headers, **more)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"/chat/{path}")

    def begin(self) -> str:
        return str(self.post("conversations").json()["id"])

    def say(self, conversation: str, content: str | None = "one", **asked: Any) -> list[dict[str, Any]]:
        """The events of the reply."""
        body = {"content": content, "models": [self.model], "max_tokens": 12} | asked
        response = self.post(f"conversations/{conversation}/replies", body)
        assert response.status_code == 200, response.text
        return [json.loads(line[6:]) for line in response.text.splitlines() if line]

    def read(self, conversation: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"conversations/{conversation}").json()
        return found
