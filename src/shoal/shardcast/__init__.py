"""SHARDCAST: weights from the learner's origin through relays to clients, over HTTP, checked at every hop.

    origin (publishes)  ->  server  <-  relay (mirrors)  ->  server  <-  client (fetches)

Usable alone; imports nothing else of Shoal. Paper: INTELLECT-2 (arXiv 2505.07291), section on SHARDCAST.
"""

from .client import Client, FetchReport
from .failover import FetchError
from .manifest import Manifest, ManifestError, SignedManifest, public_key_hex
from .origin import Origin
from .relay import Relay, RelayStatus
from .server import app, serve

__all__ = [
    "Client",
    "FetchError",
    "FetchReport",
    "Manifest",
    "ManifestError",
    "Origin",
    "Relay",
    "RelayStatus",
    "SignedManifest",
    "app",
    "public_key_hex",
    "serve",
]
