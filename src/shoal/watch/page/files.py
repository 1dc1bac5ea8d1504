"""Static files and security headers of every page.

Invariant: only files present at the start are served, and only by their exact names, so no request can reach another
file. A page runs only scripts that this server sent as files. Text never becomes markup, because
`require-trusted-types-for` makes the browser refuse `innerHTML` and similar. Browsers check each file for changes on
every load, and mostly get 304 (unchanged).
"""

import gzip
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aiohttp import web

SHARED = Path(__file__).parent / "shared"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
COMPRESSED = (".css", ".html", ".js", ".json", ".svg")
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class File:
    content: bytes
    gzipped: bytes | None
    type: str
    tag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> Self:
        gzipped = gzip.compress(content, mtime=0) if suffix in COMPRESSED else None
        return cls(content, gzipped, TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')

    def respond(self, request: web.Request) -> web.Response:
        headers = {"ETag": self.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == self.tag:
            return web.Response(status=304, headers=headers)
        zipped = self.gzipped is not None and "gzip" in request.headers.get("Accept-Encoding", "")
        if zipped:
            headers["Content-Encoding"] = "gzip"
        body = self.gzipped if zipped else self.content
        charset = "utf-8" if self.gzipped is not None else None
        return web.Response(body=body, headers=headers, content_type=self.type, charset=charset)


class Files:
    def __init__(self, folders: Iterable[Path]) -> None:
        """Load the files of these folders by name. If two have the same name, the later folder's file is used."""
        paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
        self._files = {path.name: File.of(path.read_bytes(), path.suffix) for path in paths}

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """Return the number of bytes transferred for each file."""
        return {name: len(file.gzipped or file.content) for name, file in self._files.items()}

    def respond(self, request: web.Request, name: str) -> web.Response:
        """Serve one file. Raise HTTPNotFound."""
        if name not in self._files:
            raise web.HTTPNotFound
        return self._files[name].respond(request)


def secure(application: web.Application, hosts: Collection[str] = ()) -> None:
    """Add the headers to every response, and refuse Host headers that are not in `hosts`. An empty `hosts` allows all.

    The check protects a server without a login from DNS rebinding, in which another site points its own name at it.
    """

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        del response.headers["Server"]

    @web.middleware
    async def named(request: web.Request, handler: object) -> web.StreamResponse:
        if hosts and host_name(request.headers.get("Host", "")) not in hosts:
            return web.json_response({"error": "this server is not available under this host name"}, status=421)
        answer: web.StreamResponse = await handler(request)  # type: ignore[operator]
        return answer

    application.on_response_prepare.append(add)
    application.middlewares.insert(0, named)


def host_name(host: str) -> str:
    """Return a Host header without its port, in lower case.

    >>> host_name("LocalHost:8080"), host_name("[::1]:80")
    ('localhost', '[::1]')
    """
    name, colon, port = host.strip().lower().rpartition(":")
    return name if colon and port.isdigit() else host.strip().lower()
