"""The TLS contexts of servers and readers.

Called by the command line, the roles and `protocol.node`. Weights are signed and hashed in any case; TLS adds privacy for
tokens and contents.
"""

from __future__ import annotations

import ssl
from pathlib import Path


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None without a certificate: plain http. Raises OSError (including ssl.SSLError) for invalid files."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def client_context(authority: Path | None) -> ssl.SSLContext | None:
    """None without an authority: the system's authorities are trusted."""
    return ssl.create_default_context(cafile=str(authority)) if authority else None
