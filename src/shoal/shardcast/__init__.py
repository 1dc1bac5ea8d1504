"""SHARDCAST: weights from the learner's origin through relays to clients, over HTTP, checked at every hop.

    origin (publishes)  ->  server  <-  relay (mirrors)  ->  server  <-  client (fetches)

Usable alone; imports nothing else of Shoal. Paper: INTELLECT-2 (arXiv 2505.07291), section on SHARDCAST.
"""

from .client import Client, FetchReport, Progress
from .guard import Guard
from .manifest import Manifest, ManifestError, SignedManifest, public_key_hex
from .origin import Origin
from .relay import Relay, RelayStatus
from .server import app, serve
from .sources import Access, FetchError, Limits
from .store import Store

__all__ = [
    "Access",
    "Client",
    "FetchError",
    "FetchReport",
    "Guard",
    "Limits",
    "Manifest",
    "ManifestError",
    "Origin",
    "Progress",
    "Relay",
    "RelayStatus",
    "SignedManifest",
    "Store",
    "app",
    "public_key_hex",
    "serve",
]
