"""One server, as a downloader sees it: its address, its record, three requests, and the checks of its responses.

Invariant: a `Source` verifies the signature of each manifest, and the size and hash of each shard, before it returns
them. A listing is only the server's claim. Any bad response raises a SourceError that names the URL. Bytes that
`Incoming` writes to its sink are unverified until `shard` returns.
Left out: compression, and redirects, because a relay could redirect a worker to addresses in the worker's own network.
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: clients download shards from relays and verify them; servers are ranked by
success rate times bandwidth, with a healing factor.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from socket import SO_RCVLOWAT, SOL_SOCKET
from typing import Protocol

import aiohttp
from blake3 import blake3
from pydantic import ValidationError
from yarl import URL

from shoal.shardcast.fetch import BadData, FetchError, NotHeld, RefusedVersionError, SourceError
from shoal.shardcast.fetch.reach import OutOfReach, Proxy, Reach, Resolver, check_host, is_proxy, proxy_for
from shoal.shardcast.manifest import (
    MAX_LISTING_BYTES,
    MAX_MANIFEST_BYTES,
    Listing,
    Manifest,
    ManifestError,
    Newest,
    Part,
    ShardEntry,
    SignedManifest,
    SignedNewest,
    latest,
    shard_name,
    version_name,
)


class Standing:
    """The record of one server: speed, success, latency, failures. Bad records fade with time, so that a server that
    was down or slow is tried again."""

    WEIGHT = 0.25  # the newest measurement's weight in the moving averages
    HEALS_IN_S = 30.0
    FORGOTTEN_AFTER_S = 60.0
    SUSPECT_S = 60.0  # for this long after a bad answer, a server is used only if no other answers
    # A silent server is used last for SILENT_S, or for SILENT_ONCE_S after its first silence.
    SILENT_S, SILENT_ONCE_S = 10.0, 1.0
    HEALTHY = 0.5  # lowest success rate of a healthy server

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speed_Bps, self._measured_s = 0.0, -math.inf
        self._success, self._counted_s = 1.0, -math.inf
        self._answer_s: float | None = None
        # How many requests in a row were unanswered, and when the last of them was given up.
        self._unanswered, self._silent_s = 0, -math.inf
        self._bad_s = -math.inf
        self._failures, self._rest_until_s = 0, -math.inf  # consecutive failures

    def success(self) -> float:
        """Return the fraction of requests that succeed, as a moving average."""
        return 1 - (1 - self._success) * math.exp(-(self._clock() - self._counted_s) / self.HEALS_IN_S)

    def speed_Bps(self) -> float | None:
        """Return the speed of one shard at a time, as a moving average; None if it was not measured recently."""
        return self._speed_Bps if self._clock() - self._measured_s < self.FORGOTTEN_AFTER_S else None

    def answer_s(self) -> float | None:
        """Return the latency of listings and manifests, as a moving average; None before the first answer."""
        return self._answer_s

    def silent(self) -> bool:
        """Return whether the server recently left a request unanswered and has answered none since."""
        limit_s = self.SILENT_S if self._unanswered > 1 else self.SILENT_ONCE_S
        return self._unanswered > 0 and self._clock() - self._silent_s < limit_s

    def suspect(self) -> bool:
        """Return whether the server gave a bad answer recently."""
        return self._clock() - self._bad_s < self.SUSPECT_S

    def rest_s(self) -> float:
        """Return how long to back off."""
        return max(self._rest_until_s - self._clock(), 0.0)

    def healthy(self) -> bool:
        """Return whether the server works: no failure makes it back off, it is not silent, and most requests succeed.

        A server that does not have a version yet is healthy.
        """
        resting = self._failures > 0 and self.rest_s() > 0
        return not resting and not self.silent() and self.success() >= self.HEALTHY

    def answered(self, seconds: float) -> None:
        known_s = seconds if self._answer_s is None else self._answer_s
        self._answer_s, self._unanswered = known_s + self.WEIGHT * (seconds - known_s), 0

    def unanswered(self) -> None:
        """Note that the server did not answer in time. Keep its success rate, because it may only be far away."""
        self._unanswered, self._silent_s = self._unanswered + 1, self._clock()

    def answered_badly(self) -> None:
        """Note a listing or manifest that is too large, malformed, or not signed by the learner."""
        self._bad_s = self._clock()
        self._count(0.0)

    def delivered(self, size_bytes: int, seconds: float) -> None:
        self._unanswered = self._failures = 0
        newest_Bps = size_bytes / max(seconds, 1e-6)
        known_Bps = self.speed_Bps() or newest_Bps
        self._speed_Bps, self._measured_s = known_Bps + self.WEIGHT * (newest_Bps - known_Bps), self._clock()
        self._count(1.0)

    def slowed(self, size_bytes: int, seconds: float) -> None:
        """Replace the average speed, because the server has become far slower than others."""
        self._speed_Bps, self._measured_s = size_bytes / seconds, self._clock()

    def failed(self, first_rest_s: float, longest_rest_s: float) -> None:
        """Lower the success rate, but not the speed. Back off, twice as long after each further failure."""
        self._count(0.0)
        self.rest(min(first_rest_s * 2 ** min(self._failures, 10), longest_rest_s))
        self._failures += 1

    def rest(self, seconds: float) -> None:
        """Back off although the server has not failed: it asked for a pause, or lacks something for now."""
        self._rest_until_s = self._clock() + seconds

    def _count(self, success: float) -> None:
        self._success, self._counted_s = self.success() + self.WEIGHT * (success - self.success()), self._clock()


@dataclass(frozen=True)
class Limits:
    """Timeouts of a downloader, in seconds."""

    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 30.0  # until the next byte
    answer_timeout_s: float = 30.0  # for one listing or manifest
    patience_s: float = 15.0  # for one shard while another server is available; it grows on slow links
    first_rest_s: float = 0.1  # back-off after the first failure; it doubles with each further one
    longest_rest_s: float = 2.0


@dataclass(frozen=True)
class Arrival:
    """A version that arrived, complete and verified."""

    version: int
    size_bytes: int  # bytes transferred
    took_s: float
    at_s: float  # completion, on this process's monotonic clock
    rates_Bps: dict[str, float]  # of each sender, by its URL
    behind_s: float  # from publication to completion here


@dataclass
class Access:
    """How a downloader reaches servers, and the servers' records. Many downloads share it."""

    public_key: str  # the learner's ed25519 key, in hex
    run: str | None = None
    limits: Limits = field(default_factory=Limits)
    token: Callable[[str], str] | None = None  # returns a pass for the server at a URL, see `guard.Passes`
    reach: Reach | None = None  # allowed addresses; None, which allows all, if the user named the servers
    standings: dict[str, Standing] = field(default_factory=dict)  # by URL
    on_fetched: Callable[[Arrival], None] = lambda arrival: None
    refuses: Callable[[Manifest], str] = lambda manifest: ""  # why this machine does not take a version; "": it does
    newest: Newest | None = None  # the origin's latest statement that any server sent

    def heard(self, signed: SignedNewest | None) -> None:
        if signed is not None:
            self.newest = latest(self.newest, signed.open(self.public_key, run=self.run), time.time())


LARGE_BYTES = 256 << 10  # larger manifests are parsed in a thread
READ_BUFFER_BYTES, SMALL_BUFFER_BYTES = 2 << 20, 64 << 10  # the small one is for listings and manifests
WAKE_BYTES = 32 << 10  # a shard is read in pieces of this size; a server must send one piece per idle timeout
LONGEST_RETRY_AFTER_S = 30.0

Offer = tuple[SignedManifest, Manifest]


class Sink(Protocol):
    """Receive the bytes of one shard, in order, unverified."""

    def write(self, offset_bytes: int, data: bytes) -> None: ...
    def restart(self) -> None:
        """Discard what was written."""


class Incoming:
    """One shard in transfer, possibly in parts from several servers."""

    def __init__(self, shard: ShardEntry, sink: Sink) -> None:
        self.shard, self.sink = shard, sink
        self.size_bytes = 0
        self.arrived_bytes = 0  # including discarded bytes
        self.senders: set[str] = set()
        self._digest = blake3()

    def take(self, data: bytes) -> None:
        self._digest.update(data)
        self.sink.write(self.size_bytes, data)
        self.size_bytes += len(data)
        self.arrived_bytes += len(data)

    def restart(self) -> None:
        self.sink.restart()
        self.size_bytes, self._digest = 0, blake3()
        self.senders.clear()

    def matches(self) -> bool:
        return self._digest.hexdigest() == self.shard.hash


def open_session(access: Access) -> aiohttp.ClientSession:
    resolver = Resolver(access.reach, exempt=is_proxy) if access.reach else None
    limits = access.limits
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, resolver=resolver),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_timeout_s, sock_read=limits.idle_timeout_s
        ),
        auto_decompress=False,  # a server could send a decompression bomb
        cookie_jar=aiohttp.DummyCookieJar(),  # a server must not set cookies for other servers on its host
        headers={"Accept-Encoding": "identity"},
    )


class Source:
    def __init__(self, session: aiohttp.ClientSession, url: str, access: Access) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.access = access
        self.standing = access.standings.setdefault(self.url, Standing())
        self.received_bytes = 0

    @cached_property
    def proxy(self) -> Proxy | None:
        """Return the proxy for this server; None for a direct connection. Raise FetchError."""
        return proxy_for(self.url)

    async def listing(self) -> Listing:
        """Return the versions that the server claims to have, newest first, and its path from the origin."""
        body = await self._small("versions.json", MAX_LISTING_BYTES)
        try:
            listing = Listing.model_validate_json(body)
        except ValidationError as error:
            raise self._bad("versions.json is malformed; check that this is a SHARDCAST server") from error
        self.access.heard(listing.newest)
        return listing.model_copy(update={"versions": tuple(sorted(listing.versions, reverse=True))})

    async def manifest(self, version: int) -> Offer:
        body = await self._small(f"{version_name(version)}/manifest.json", MAX_MANIFEST_BYTES)

        def opened() -> Offer:
            signed = SignedManifest.parse(body)
            return signed, signed.open(self.access.public_key, run=self.access.run, version=version)

        try:
            offer = opened() if len(body) <= LARGE_BYTES else await asyncio.to_thread(opened)
        except ManifestError as error:
            raise self._bad(f"manifest of version {version}: {error}") from error
        if why := self.access.refuses(offer[1]):
            raise RefusedVersionError(f"version {version} is refused: {why}")
        return offer

    async def shard(self, version: int, part: Part, incoming: Incoming) -> None:
        """Receive the rest of one shard. Return only if the whole shard is correct. Let errors of the sink pass."""
        shard = incoming.shard
        what = f"shard {shard.index} ({part}) of version {version}"
        headers = {"Range": f"bytes={incoming.size_bytes}-"} if incoming.size_bytes else {}
        # Caches need the hash, because an origin that starts over publishes other bytes under the same name.
        path = f"{version_name(version)}/{shard_name(part, shard.index)}?{shard.hash[:16]}"
        async with self._get(path, what, headers) as response:
            if incoming.size_bytes and not _continues(response, incoming.size_bytes):
                incoming.restart()  # the server ignores ranges and sends the whole shard
            incoming.senders.add(self.url)
            since_s, since_bytes = time.monotonic(), incoming.arrived_bytes
            with _read_in_pieces(response) as expect:
                async for chunk in response.content.iter_any():
                    self.received_bytes += len(chunk)
                    incoming.take(chunk[: shard.size_bytes - incoming.size_bytes])
                    if incoming.size_bytes == shard.size_bytes:
                        break  # a malicious server may never end its response
                    expect(shard.size_bytes - incoming.size_bytes)
                    if (took_s := time.monotonic() - since_s) >= self.access.limits.idle_timeout_s:
                        if (sent_bytes := incoming.arrived_bytes - since_bytes) < WAKE_BYTES:
                            raise SourceError(self.url, f"sent {sent_bytes} bytes of {what} in {took_s:.0f} s")
                        since_s, since_bytes = time.monotonic(), incoming.arrived_bytes
        if incoming.size_bytes != shard.size_bytes:  # the response has ended, but the shard is not complete
            raise BadData(self.url, f"{what} ended after {incoming.size_bytes} of {shard.size_bytes} bytes")
        if not incoming.matches():
            alone = incoming.senders == {self.url}
            incoming.restart()
            kind = BadData if alone else SourceError  # with several senders, any of them may be at fault
            raise kind(self.url, f"{what} is corrupt: its hash is not the one in the manifest")

    async def _small(self, path: str, max_bytes: int) -> bytes:
        """Fetch a listing or manifest."""
        body = bytearray()
        async with self._get(path, path, {}, answer=True) as response:
            if (response.content_length or 0) > max_bytes:
                raise self._bad(f"{path} is longer than {max_bytes} bytes")
            async for chunk in response.content.iter_any():
                self.received_bytes += len(chunk)
                body += chunk
                if len(body) > max_bytes:
                    raise self._bad(f"{path} is longer than {max_bytes} bytes")
        return bytes(body)

    def _bad(self, reason: str) -> BadData:
        """Return the error for a bad listing or manifest, and mark the server as suspect."""
        self.standing.answered_badly()
        return BadData(self.url, reason)

    @asynccontextmanager
    async def _get(
        self, path: str, what: str, headers: dict[str, str], *, answer: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a response. Its headers, and the body of an `answer`, must arrive within `answer_timeout_s`."""
        if self.access.token is not None:
            headers = headers | {"Authorization": f"Bearer {self.access.token(self.url)}"}
        try:
            async with (
                asyncio.timeout(self.access.limits.answer_timeout_s) as waiting,
                await self._send(path, headers, SMALL_BUFFER_BYTES if answer else READ_BUFFER_BYTES) as response,
            ):
                if not answer:
                    waiting.reschedule(None)
                if response.status == 404:
                    raise NotHeld(self.url, f"does not hold {what} (404)")
                if response.status == 416:
                    raise BadData(self.url, f"{what} is too short: no bytes at {headers.get('Range')} (416)")
                if response.status not in (200, 206):
                    raise SourceError(
                        self.url, f"answered {response.status} for {what}", retry_after_s=_retry_after_s(response)
                    )
                yield response
        except TimeoutError as error:
            raise SourceError(self.url, f"timed out while sending {what}{self._through()}") from error
        except OutOfReach as error:
            raise SourceError(self.url, str(error)) from error
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, OutOfReach):
                raise SourceError(self.url, str(error.os_error)) from error  # aiohttp reports it as a DNS error
            reason = f"{type(error).__name__} while fetching {what}{self._through()}: {error}"
            raise SourceError(self.url, reason) from error

    async def _send(self, path: str, headers: dict[str, str], buffer_bytes: int) -> aiohttp.ClientResponse:
        """Send a request. A URL or proxy that cannot be used is a SourceError, because other servers may work."""
        try:
            proxy = self.proxy
            _check_address(self.url, self.access)
            return await self.session.get(
                f"{self.url}/{path}",
                allow_redirects=False,
                headers=headers,
                proxy=proxy.url if proxy else None,
                read_bufsize=buffer_bytes,
            )
        except (FetchError, ValueError) as error:  # ValueError: a name that DNS cannot hold
            raise SourceError(self.url, str(error)) from error

    def _through(self) -> str:
        return f" through the proxy {self.proxy.shown}, which the environment names" if self.proxy else ""


def _check_address(url: str, access: Access) -> None:
    """Raise OutOfReach for an address; the session's resolver checks names. aiohttp connects to `raw_host`, in which ASCII
    digits replace others, such as circled ones."""
    if access.reach:
        check_host(URL(url).raw_host or "", access.reach)


PIECE_BYTES = 1 << 20


async def exchange(
    access: Access, method: str, url: str, *, headers: dict[str, str], data: bytes = b"", max_bytes: int = 0
) -> tuple[int, bytes]:
    """Send one request to a URL that another party named, as to a relay: within reach, without redirects.

    Return status and body, or "" for a body that is longer than `max_bytes`. No piece may take `idle_timeout_s`. Raise
    SourceError.
    """
    server, body = str(URL(url, encoded=True).origin()), bytearray()
    try:
        proxy = proxy_for(server)
        _check_address(server, access)
        async with asyncio.timeout(access.limits.idle_timeout_s) as waiting, open_session(access) as session:

            def go_on() -> None:
                waiting.reschedule(asyncio.get_running_loop().time() + access.limits.idle_timeout_s)

            async def pieces() -> AsyncIterator[bytes]:
                for at in range(0, len(data), PIECE_BYTES):
                    go_on()
                    yield data[at : at + PIECE_BYTES]

            async with session.request(
                method,
                URL(url, encoded=True),  # the signature covers these characters
                data=pieces() if data else None,
                headers=headers | ({"Content-Length": str(len(data))} if data else {}),
                skip_auto_headers=["Content-Type"],
                allow_redirects=False,
                proxy=proxy.url if proxy else None,
            ) as response:
                while len(body) <= max_bytes and (part := await response.content.read(PIECE_BYTES)):
                    if len(body) // WAKE_BYTES < (len(body) + len(part)) // WAKE_BYTES:
                        go_on()
                    body += part
                return response.status, bytes(body) if len(body) <= max_bytes else b""
    except (FetchError, ValueError, TimeoutError, aiohttp.ClientError, OutOfReach) as error:
        inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        raise SourceError(server, f"{type(inner).__name__} {inner}") from error


@contextmanager
def _read_in_pieces(response: aiohttp.ClientResponse) -> Iterator[Callable[[int], None]]:
    """Let the kernel wake this process once per WAKE_BYTES of the body instead of once per packet.

    On a slow link, most CPU time goes into waking up. Yield a function to call with the number of bytes still expected.
    """
    connection = response.connection  # None if the whole body has arrived
    socket = connection and connection.transport and connection.transport.get_extra_info("socket")

    def expect(size_bytes: int) -> None:
        if socket and sys.platform == "linux":
            with suppress(OSError):  # the socket may already be closed
                socket.setsockopt(SOL_SOCKET, SO_RCVLOWAT, max(1, min(size_bytes, WAKE_BYTES)))

    try:
        yield expect
    finally:
        expect(0)


def _continues(response: aiohttp.ClientResponse, offset_bytes: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {offset_bytes}-")


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER_S) if text.isdecimal() else None
