"""The listening socket of a server: it limits open connections and resets idle or stalled ones.

Invariant: every accepted connection counts until it is closed. A server accepts no more connections than its file limit
allows. A connection over its address's limit, or over the total limit, is closed without being read. If the total limit
is reached, the oldest connection without an accepted request is reset too, so neither idle clients nor strangers can
lock others out. The application says which requests it accepts (`keep_open`). A client is reset if it sends none within
`headers_s`. It is also reset if it stops reading the response, even during a `sendfile`. Time in which this process did
not run does not count, so an overloaded or frozen server does not blame clients for its own delay. Malformed requests
(answered with 400) and clients that disconnect early are not logged, because aiohttp would log a traceback and the
whole request for each of them, up to hundreds of kilobytes.
Left out: limits across processes; slow-reader detection on systems other than Linux.
Source: BBR, draft-ietf-ccwg-bbr; `struct tcp_info` of Linux, include/uapi/linux/tcp.h.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Set
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import HttpProcessingError

CLIENT_ERRORS = (HttpProcessingError, ClientConnectionResetError)

LOG = logging.getLogger("shoal.serve")


def _is_server_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], CLIENT_ERRORS))


LOG.addFilter(_is_server_error)


RESERVED = 128  # open files kept for databases, logs, libraries and outgoing connections

log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raise this process's open-file limit as far as the system allows. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft == resource.RLIM_INFINITY:
        return soft if soft != resource.RLIM_INFINITY else sys.maxsize
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable(wanted: int) -> int:
    """Return how many of the `wanted` connections the open-file limit allows. Log a warning unless it allows all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if soft == resource.RLIM_INFINITY else max(1, (soft - RESERVED) // 2)
    if allowed < wanted < sys.maxsize:
        log.warning(
            "this process may open %d files, so it accepts %d connections instead of %d; raise `ulimit -n`",
            soft,
            allowed,
            wanted,
        )
    return min(wanted, allowed)


# On long lossy links BBR is several times faster than CUBIC, which treats each loss as congestion.
CONGESTION = b"bbr"
# Limit of unsent bytes in the kernel. Each stalled reader costs this much memory.
UNSENT_BYTES = 2 << 20
BACKLOG = 1024
LONGEST_PERIOD_S = 1.0  # longest time between two checks of all connections

TCP_INFO = struct.Struct("=24xI92xQ16xI")  # reads tcpi_unacked (in segments), tcpi_bytes_acked, tcpi_notsent_bytes
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Patience:
    """How long a connection may be idle or slow."""

    headers_s: float = 10.0  # from accept to the first accepted request
    idle_s: float = 75.0  # between two requests
    stall_s: float = 30.0  # for this long, a client may read nothing or too slowly while data waits for it
    slowest_Bps: float = 10_000.0  # a client that reads fewer bytes per second, on average, reads too slowly


PATIENCE = Patience()


class ClientConnection(socket.socket):
    """An accepted socket. Closing it unregisters it from its listener."""

    def __init__(self, listener: Listener, peer: tuple[str, int], fd: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=fd)
        self.listener, self.peer = listener, peer
        self.requested = False  # the client sent a request that the server accepts
        self.reader: str | None = None  # the reader who sent the last accepted request; None without a guard
        # `moved_s` is the time of the last progress. `since_s` and `since_bytes` are the start of the period whose
        # average speed is checked.
        self.accepted_s = self.moved_s = self.since_s = time.monotonic()
        self.taken_bytes = self.since_bytes = 0

    def close(self) -> None:
        super().close()
        self.listener.forget(self)

    def cut(self) -> None:
        """Reset the connection. The transport's `abort` would leave a running `sendfile` hanging."""
        with suppress(OSError):  # the reader may have closed the connection already
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.shutdown(socket.SHUT_RDWR)

    def excuse(self, late_s: float) -> None:
        """Do not blame the peer for `late_s` seconds in which this process did not run."""
        self.accepted_s += late_s
        self.moved_s += late_s
        self.since_s += late_s

    def stalled(self, now_s: float, patience: Patience) -> bool:
        if not self.requested:
            return now_s - self.accepted_s >= patience.headers_s
        progress = _progress(self)
        if progress is None:  # all bytes are acknowledged, or the system does not report it
            self.moved_s = self.since_s = now_s
            return False
        if progress != self.taken_bytes:
            self.taken_bytes, self.moved_s = progress, now_s
        if now_s - self.moved_s >= patience.stall_s:
            return True
        if now_s - self.since_s < patience.stall_s:
            return False
        slow = self.taken_bytes - self.since_bytes < patience.slowest_Bps * (now_s - self.since_s)
        self.since_s, self.since_bytes = now_s, self.taken_bytes
        return slow


class Listener(socket.socket):
    """A bound socket that accepts at most `per_address` connections from one address and `total` overall."""

    def __init__(self, host: str, port: int, patience: Patience, *, per_address: int, total: int) -> None:
        """Raise OSError if the address cannot be bound."""
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)  # prefer IPv4
        super().__init__(family, kind, proto)
        self.patience, self.per_address, self.total = patience, per_address, affordable(total)
        self.open: dict[tuple[str, int], ClientConnection] = {}  # by the peer's address and port
        self._silent: dict[ClientConnection, None] = {}  # connections without an accepted request yet, oldest first
        self.refused = self.cut = 0
        self._of_address: Counter[str] = Counter()
        try:
            if os.name == "posix":
                self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
        except OSError as error:
            self.close()
            why = (error.strerror or str(error)).lower()
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {why}") from error
        self.congestion = prefer_bbr(self)
        with suppress(AttributeError, OSError):
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        accepted, peer = super().accept()
        peer = peer[:2]
        address = network(peer[0])
        if self._of_address[address] >= self.per_address or not self._has_room():
            self.refused += 1
            accepted.close()
            raise ConnectionAbortedError("too many connections")  # asyncio ignores this, as if the client had left
        connection = ClientConnection(self, peer, accepted.detach())
        prefer_bbr(connection)  # set it again, because a route's setting overrides the listener's
        if earlier := self.open.get(peer):
            self.forget(earlier)
        self.open[peer] = connection
        self._silent[connection] = None
        self._of_address[address] += 1
        return connection, peer

    def _has_room(self) -> bool:
        if len(self.open) < self.total:
            return True
        if oldest := next(iter(self._silent), None):
            del self._silent[oldest]
            self.cut += 1
            oldest.cut()  # it counts until it is closed, so the file limit is never exceeded
        return False

    def forget(self, connection: ClientConnection) -> None:
        self._silent.pop(connection, None)
        if self.open.get(connection.peer) is connection:
            del self.open[connection.peer]
            address = network(connection.peer[0])
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def note_request(self, peer: tuple[str, int], reader: str | None = None) -> None:
        """Note that this peer sent a request that the server accepts, and which reader it authenticated as."""
        if connection := self.open.get(peer[:2]):
            connection.requested, connection.reader = True, reader
            self._silent.pop(connection, None)

    def cut_readers(self, readers: Set[str]) -> None:
        """Reset the connections of these readers, even during a transfer."""
        for connection in list(self.open.values()):
            if connection.reader in readers:
                self._cut(connection)

    async def watching(self, _: object) -> AsyncIterator[None]:
        """Watch all connections while the server runs. aiohttp runs this as an entry of its `cleanup_ctx`."""
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()

    async def _watch(self) -> None:
        period_s = min(LONGEST_PERIOD_S, self.patience.headers_s / 10, self.patience.stall_s / 10)
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(period_s)
            now_s = time.monotonic()
            late_s = now_s - slept_s - period_s
            for connection in list(self.open.values()):
                connection.excuse(late_s)
                if connection.fileno() == -1:
                    self.forget(connection)
                elif connection.stalled(now_s, self.patience):
                    self._cut(connection)

    def _cut(self, connection: ClientConnection) -> None:
        self.forget(connection)
        self.cut += 1
        connection.cut()


LISTENER = web.AppKey("listener", Listener)


def keep_open(request: web.Request, reader: str | None = None) -> None:
    """Let this request's connection stay open, because the sender may use this server."""
    if (listener := request.config_dict.get(LISTENER)) and request.transport:
        listener.note_request(request.transport.get_extra_info("peername"), reader)


@web.middleware
async def keep_all_open(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Keep the connections of all requests open, for a server that refuses no client."""
    keep_open(request)
    return await handler(request)


async def started(
    application: web.Application, listener: Listener, *, shutdown_s: float = 1.0, backlog: int = BACKLOG, **more: Any
) -> web.AppRunner:
    """Serve the application on this listener. The runner's `cleanup` gives running requests `shutdown_s` to finish."""
    application[LISTENER] = listener
    application.cleanup_ctx.append(listener.watching)
    runner = web.AppRunner(
        application,
        access_log=None,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=listener.patience.idle_s,
        auto_decompress=False,  # a small body could become a large one
        **more,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=backlog).start()
    return runner


def is_foreign(request: web.Request, names: Collection[str]) -> bool:
    """Return whether a request came over loopback under a name of the internet that is none of `names`.

    Another site's page sends such requests after it has pointed its own name at this machine (DNS rebinding). It cannot
    use an address, or a name without a dot.
    """
    here: Any = request.transport.get_extra_info("sockname") if request.transport else None
    host = request.headers.get("Host", "").lower().rpartition("@")[2]
    host = host.removeprefix("[").partition("]" if host.startswith("[") else ":")[0].removesuffix(".")
    own = host in names or "." not in host or is_address(host)
    return bool(here) and ip_address(here[0]).is_loopback and not own


def is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def prefer_bbr(connection: socket.socket) -> str:
    """Select BBR if possible. Return the congestion control in use, or "unknown" if the system does not report it."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "unknown"
    with suppress(OSError):  # BBR may not be available to this user
        connection.setsockopt(socket.IPPROTO_TCP, option, CONGESTION)
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()
    except OSError:
        return "unknown"


def network(address: str) -> str:
    """Return the client's IPv4 address, or the /64 of its IPv6 address, because one client may own a whole /64."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(ip, IPv6Address):
        return address
    return str(ip.ipv4_mapped or IPv6Address(int(ip) >> 64 << 64))


def _progress(connection: socket.socket) -> int | None:
    """Return the bytes that the peer has acknowledged so far. Return None if it has acknowledged all, or if the system
    does not report it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        unacked, acked_bytes, unsent_bytes = TCP_INFO.unpack_from(info)
    except (AttributeError, OSError, struct.error):
        return None
    return int(acked_bytes) if unacked or unsent_bytes else None
