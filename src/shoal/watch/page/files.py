"""Static files, read once at the start and served by exact name.

Invariant: only files that were there at the start are served, so no path in a request leads anywhere else.
Used by every page. A browser asks again each time and mostly hears that its copy is current.
"""

import gzip
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class File:
    content: bytes
    gzipped: bytes | None
    type: str
    tag: str


class Files:
    def __init__(self, folders: Iterable[Path]) -> None:
        """The files of these folders by their names; of two with one name, the later folder's."""
        self._files = {
            path.name: _read(path) for folder in folders for path in sorted(folder.iterdir()) if path.is_file()
        }

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """What each file weighs on its way."""
        return {name: len(file.gzipped or file.content) for name, file in self._files.items()}

    def respond(self, request: web.Request, name: str) -> web.Response:
        """Raises HTTPNotFound."""
        file = self._files.get(name)
        if file is None:
            raise web.HTTPNotFound
        headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        zipped = file.gzipped is not None and "gzip" in request.headers.get("Accept-Encoding", "")
        if zipped:
            headers["Content-Encoding"] = "gzip"
        body = file.gzipped if zipped else file.content
        return web.Response(
            body=body, headers=headers, content_type=file.type, charset="utf-8" if file.gzipped is not None else None
        )


def _read(path: Path) -> File:
    content = path.read_bytes()
    gzipped = gzip.compress(content, mtime=0) if path.suffix in COMPRESSED else None
    return File(content, gzipped, TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')
