"""Bearer keys of the API: who may ask, and whose places a request takes.

Invariant: keys are compared by their digests in constant time, and never written to a log.
Called by the routes of `openai`. A key file holds one `NAME KEY` a line.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from aiohttp import web

from shoal.errors import UserError
from shoal.files import write_new_file
from shoal.shardcast.connections import network

LEAST = 16  # characters of a key


class KeyFileError(UserError):
    """A key file that cannot be read."""


class Keys:
    def __init__(self, keys: dict[str, str] | None) -> None:
        """Names by key; None: everyone may ask."""
        self._names = None if keys is None else {_digest(key): name for key, name in keys.items()}

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Raises KeyFileError."""
        found: dict[str, str] = {}
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise KeyFileError(f"{path}: {error.strerror}; it should hold one `NAME KEY` a line") from error
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            words = line.split()
            if len(words) != 2 or len(words[1]) < LEAST:
                raise KeyFileError(f"{path}, line {number}: write `NAME KEY`, a key of {LEAST} characters or more")
            found[words[1]] = words[0]
        return cls(found)

    @classmethod
    def read_or_make(cls, path: Path) -> "Keys":
        """The keys in this file; a new file with one random key if there is none."""
        if not path.exists():
            write_new_file(path, f"local sk-{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
        return cls.read(path)

    def caller(self, request: web.Request) -> str | None:
        """Whose request this is; None: nobody's who may ask."""
        if self._names is None:
            return f"address {network(request.remote or '')}"
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        given, caller = _digest(key.strip()), None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                caller = f"key {name}"
        return caller


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
