"""One server seen from a downloader: three questions, and every way the answer can be bad.

Invariant: what a `Source` returns was checked (manifest signature, shard size and hash); anything else is a
SourceError that names the URL. Bytes handed to a shard's sink are unchecked until `shard` returns.
Called by `failover.Sources`, and through it by relay and client.
Left out: redirects (a relay could point a worker into its own network), compression, throughput figures.
Paper: INTELLECT-2, SHARDCAST: clients download shards from relays and verify them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
from blake3 import blake3
from pydantic import ValidationError

from .manifest import Manifest, ManifestError, ShardEntry, SignedManifest
from .store import Listing, shard_name, version_name

MAX_SMALL_BYTES = 32 << 20  # a manifest of 100k shards has 13 MB
READ_BUFFER_BYTES = 2 << 20

Offer = tuple[SignedManifest, Manifest]

# Takes (offset within the shard, bytes). Called again from offset 0 when a shard is fetched anew.
Sink = Callable[[int, bytes], None]


class SourceError(Exception):
    """This source did not deliver now; it may later."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason = url, reason


class NotHeld(SourceError):
    """The source says it does not have that."""


class BadData(SourceError):
    """The source sent something other than what the learner published."""


def open_session(*, connect_timeout_s: float, idle_timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=idle_timeout_s),
        auto_decompress=False,  # no decompression bombs; hashes are over plain bytes
        headers={"Accept-Encoding": "identity"},
        read_bufsize=READ_BUFFER_BYTES,
    )


class Source:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        public_key: str,
        run: str | None,
        answer_timeout_s: float,
    ) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.public_key = public_key
        self.run = run
        self.answer_timeout_s = answer_timeout_s
        self.received_bytes = 0

    async def versions(self) -> list[int]:
        """The versions the source claims to have, newest first."""
        body = await self._small("versions.json")
        try:
            return sorted(Listing.model_validate_json(body).versions, reverse=True)
        except ValidationError as error:
            raise BadData(self.url, "versions.json is malformed; is this a SHARDCAST server?") from error

    async def manifest(self, version: int) -> Offer:
        body = await self._small(f"{version_name(version)}/manifest.json")
        try:
            signed = SignedManifest.parse(body)
            return signed, signed.open(self.public_key, run=self.run, version=version)
        except ManifestError as error:
            raise BadData(self.url, f"manifest of version {version}: {error}") from error

    async def shard(self, version: int, shard: ShardEntry, sink: Sink) -> None:
        """Streams one shard into `sink`; returns only if it was right. The sink's own errors pass through."""
        what = f"shard {shard.index} of version {version}"
        digest, size_bytes = blake3(), 0
        async with self._get(f"{version_name(version)}/{shard_name(shard.index)}", what) as response:
            async for chunk in response.content.iter_any():
                self.received_bytes += len(chunk)
                if size_bytes + len(chunk) > shard.size_bytes:
                    raise BadData(self.url, f"{what} is longer than its {shard.size_bytes} bytes")
                digest.update(chunk)
                sink(size_bytes, chunk)
                size_bytes += len(chunk)
        if size_bytes != shard.size_bytes:
            raise BadData(self.url, f"{what} ended after {size_bytes} of {shard.size_bytes} bytes")
        if digest.hexdigest() != shard.hash:
            raise BadData(self.url, f"{what} is corrupt: its hash is not the one in the manifest")

    async def _small(self, path: str) -> bytes:
        body = bytearray()
        async with self._get(path, path, aiohttp.ClientTimeout(total=self.answer_timeout_s)) as response:
            async for chunk in response.content.iter_any():
                self.received_bytes += len(chunk)
                body += chunk
                if len(body) > MAX_SMALL_BYTES:
                    raise BadData(self.url, f"{path} is longer than {MAX_SMALL_BYTES} bytes")
        return bytes(body)

    @asynccontextmanager
    async def _get(
        self, path: str, what: str, timeout: aiohttp.ClientTimeout | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self.session.get(
                f"{self.url}/{path}", allow_redirects=False, timeout=timeout or self.session.timeout
            ) as response:
                if response.status == 404:
                    raise NotHeld(self.url, f"does not hold {what} (404)")
                if response.status != 200:
                    raise SourceError(self.url, f"answered {response.status} for {what}")
                yield response
        except TimeoutError as error:
            raise SourceError(self.url, f"sent nothing for too long while asked for {what}") from error
        except aiohttp.ClientError as error:
            raise SourceError(self.url, f"{type(error).__name__} while asked for {what}: {error}") from error
