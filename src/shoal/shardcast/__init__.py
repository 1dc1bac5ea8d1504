"""SHARDCAST: sends weights from the learner's origin through relays to clients over HTTP, verified at every hop.

    origin (publishes)  ->  server  <-  relay (mirrors)  ->  server  <-  client (fetches)

    contents   which files of a folder may be published         store    the folder of versions that is served
    origin     a folder of files into a signed version          relay    mirrors a store and serves arriving shards
    format/    manifest, listing, files, deltas                 fetch/   from servers into a folder, or in place
    serve/     HTTP, access, rate limits, connections           alone    all of it without a pool

Usable alone: it imports only `errors` and `files` of Shoal. docs/shardcast.md says how it works and what it costs.
Paper: INTELLECT-2 (arXiv 2505.07291), section on SHARDCAST.
"""

from shoal.shardcast.contents import PublishError
from shoal.shardcast.fetch.client import Client, FetchReport, Progress
from shoal.shardcast.fetch.errors import FetchError
from shoal.shardcast.fetch.source import Access, Arrival, Limits
from shoal.shardcast.format.manifest import Manifest, ManifestError, SignedManifest, public_key_hex
from shoal.shardcast.origin import Origin
from shoal.shardcast.relay import Relay, RelayStatus
from shoal.shardcast.serve.guard import Guard
from shoal.shardcast.serve.server import app, serve
from shoal.shardcast.store import Store

__all__ = [
    "Access",
    "Arrival",
    "Client",
    "FetchError",
    "FetchReport",
    "Guard",
    "Limits",
    "Manifest",
    "ManifestError",
    "Origin",
    "Progress",
    "PublishError",
    "Relay",
    "RelayStatus",
    "SignedManifest",
    "Store",
    "app",
    "public_key_hex",
    "serve",
]
