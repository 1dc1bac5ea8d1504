"""SHARDCAST: send weights from the learner's origin through relays to clients over HTTP, and verify them at every hop.

    origin (publishes)  ->  server  <-  relay (mirrors)  ->  server  <-  client (fetches)

    origin     publishes a folder as a signed version     manifest    signed manifests, statements, version lists
    store      the folder of versions to serve            files       a version's files, cut into shards
    relay      mirrors a store and serves it              delta       the exact difference between two versions
    server     HTTP, with guard and connections           fetch/      downloads from servers into a folder
    alone      the API for use without a pool

This package can be used alone: it imports only `errors` and `files` from Shoal. docs/shardcast.md explains how it works
and what it costs.
Paper: INTELLECT-2 (arXiv 2505.07291), section on SHARDCAST.
"""

from shoal.shardcast.fetch import FetchError
from shoal.shardcast.fetch.client import Client, Progress
from shoal.shardcast.fetch.source import Access, Arrival, Limits
from shoal.shardcast.guard import Guard
from shoal.shardcast.manifest import Manifest, ManifestError, SignedManifest, public_key_hex
from shoal.shardcast.origin import Origin, PublishError
from shoal.shardcast.relay import Relay, RelayStatus
from shoal.shardcast.server import app, serve
from shoal.shardcast.store import ShardStore

__all__ = [
    "Access",
    "Arrival",
    "Client",
    "FetchError",
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
    "ShardStore",
    "app",
    "public_key_hex",
    "serve",
]
