"""The two contexts that https needs: what a server shows, and whom a reader trusts.

Called by the command line and the pool. Weights are signed and hashed whatever carries them; TLS keeps tokens and what is
fetched from others' eyes.
"""

from __future__ import annotations

import ssl
from pathlib import Path


def serving(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None where no certificate is given: plain http. Raises OSError (ssl.SSLError among them) for files that won't do."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def trusting(authority: Path | None) -> ssl.SSLContext | None:
    """None where no authority is given: the system's are trusted."""
    return ssl.create_default_context(cafile=str(authority)) if authority else None
