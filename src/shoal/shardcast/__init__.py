"""SHARDCAST: weights from the learner's origin through relays to clients, over HTTP, checked at every hop.

    origin (publishes)  ->  server  <-  relay (mirrors)  ->  server  <-  client (fetches)

    what a version is    manifest, store, files
    publishing           origin, cutter, latest, delta, delta_format, safetensors_layout, readable
    while it is written  handover, growing
    asking               source (one server), sources (which of several), download (many shards), relay (places), shard_file
    having               client, plan, partial, cache, follow, inplace
    serving              server, shelf, connections, guard, rates, tls
    without a pool       alone

Usable alone; imports nothing else of Shoal. docs/shardcast.md tells how it works and what it costs.
Paper: INTELLECT-2 (arXiv 2505.07291), section on SHARDCAST.
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
