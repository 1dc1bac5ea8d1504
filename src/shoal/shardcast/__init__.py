"""SHARDCAST: weights from the learner's origin through relays to clients, over HTTP, checked at every hop.

    origin (publishes)  ->  server  <-  relay (mirrors)  ->  server  <-  client (fetches)

    format/    manifest, safetensors layout, deltas            store    the folder of versions that is served
    publish/   a folder of weights into a signed version       fetch/   from sources to a checked folder, or in place
    relay/     mirrors a store and passes shards on            serve/   HTTP, access, rate limits, connections
    alone      all of it without a pool

Usable alone; imports nothing of Shoal but `errors` and `files`. docs/shardcast.md tells how it works and what it costs.
Paper: INTELLECT-2 (arXiv 2505.07291), section on SHARDCAST.
"""

from shoal.shardcast.fetch.client import Client, FetchReport, Progress
from shoal.shardcast.fetch.sources import Access, FetchError, Limits
from shoal.shardcast.format.manifest import Manifest, ManifestError, SignedManifest, public_key_hex
from shoal.shardcast.publish.origin import Origin
from shoal.shardcast.relay.relay import Relay, RelayStatus
from shoal.shardcast.serve.guard import Guard
from shoal.shardcast.serve.server import app, serve
from shoal.shardcast.store import Store

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
