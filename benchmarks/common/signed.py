"""Signed requests as bytes, for scripts that write them to plain sockets."""

import secrets
import time

from shoal.protocol.identity import Identity
from shoal.protocol.signing import sign_request


def signed_request(
    identity: Identity, run: str, host: str, path: str, body: bytes, method: str = "POST", **changed: str
) -> bytes:
    """Return the bytes of one signed request, valid for a minute. `changed`: headers that replace the right ones."""
    headers = sign_request(
        identity,
        method=method,
        path=path,
        query="",
        body=body,
        audience=run,
        created_s=int(time.time()),
        nonce=secrets.token_hex(16),
    )
    head = {"host": host, "content-length": str(len(body))} | headers | changed
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in head.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
