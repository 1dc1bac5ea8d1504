"""The socket a server listens on: how many connections it holds open, and which of them it cuts.

Invariant: every accepted connection counts until it is closed. One too many, of its address or in total, is closed
unread, before any TLS. One that does not ask within `headers_s`, or leaves what it asked for lying, is reset, whatever
the server is doing with it just then (a `sendfile` too), so that no reader holds more than a socket for long.
Called by `server.serve`, and by `guard.Guard` when it bans a reader.
Left out: counts over several processes; and what a reader takes is known on Linux only (elsewhere none is cut as slow).
Source: BBR, draft-ietf-ccwg-bbr; `struct tcp_info` of Linux, include/uapi/linux/tcp.h.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from aiohttp import web

# Over long lossy links it carries several times more than CUBIC, which takes each loss for congestion.
CONGESTION = b"bbr"
# The kernel takes no more than this beyond what is under way: else each stalled reader costs megabytes of its memory.
UNSENT_BYTES = 2 << 20
BACKLOG = 1024
LONGEST_LOOK_S = 1.0

TCP_INFO = struct.Struct("=24xI92xQ16xI")  # tcpi_unacked (segments), tcpi_bytes_acked, tcpi_notsent_bytes
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Patience:
    """How long a connection may do nothing useful."""

    headers_s: float = 10.0  # from accepting it to its first whole request, TLS included
    idle_s: float = 75.0  # between two requests
    stall_s: float = 30.0  # while it takes nothing, or less than slowest_Bps on average, though something is to be had
    slowest_Bps: float = 10_000.0


PATIENCE = Patience()


class Connection(socket.socket):
    """An accepted socket. It leaves the listener's table when it is closed."""

    def __init__(self, listener: Listener, peer: tuple[str, int], fd: int) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=fd)
        self.listener, self.peer = listener, peer
        self.asked = False
        self.reader: str | None = None  # of its last request, where readers are told apart
        self.accepted_s = self.moved_s = self.since_s = time.monotonic()
        self.taken_bytes = self.since_bytes = 0

    def close(self) -> None:
        super().close()
        self.listener.forget(self)

    def cut(self) -> None:
        """Resets it. Not by the transport's `abort`, which would leave a `sendfile` waiting for a closed socket."""
        with suppress(OSError):  # the reader was faster
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.shutdown(socket.SHUT_RDWR)

    def useless(self, now_s: float, patience: Patience) -> bool:
        if not self.asked:
            return now_s - self.accepted_s >= patience.headers_s
        progress = _progress(self)
        if progress is None:  # it has all it asked for, or the system does not tell
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
    """A bound socket; accepts at most `per_address` connections of one address and `total` of all."""

    def __init__(self, host: str, port: int, patience: Patience, *, per_address: int, total: int) -> None:
        """Raises OSError where the address cannot be had."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        super().__init__(family, kind, proto)
        self.patience, self.per_address, self.total = patience, per_address, total
        self.open: dict[tuple[str, int], Connection] = {}  # by the peer's address and port
        self.refused = self.cut = 0
        self._of_address: Counter[str] = Counter()
        try:
            if os.name == "posix":
                self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
        except OSError:
            self.close()
            raise
        self.congestion = prefer_bbr(self)
        with suppress(AttributeError, OSError):
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        accepted, peer = super().accept()
        peer = peer[:2]
        address = network(peer[0])
        if len(self.open) >= self.total or self._of_address[address] >= self.per_address:
            self.refused += 1
            accepted.close()
            raise ConnectionAbortedError("too many connections")  # asyncio takes it for one that left again
        connection = Connection(self, peer, accepted.detach())
        prefer_bbr(connection)  # a route's own choice would override what it inherits
        if earlier := self.open.get(peer):
            self.forget(earlier)
        self.open[peer] = connection
        self._of_address[address] += 1
        return connection, peer

    def forget(self, connection: Connection) -> None:
        if self.open.get(connection.peer) is connection:
            del self.open[connection.peer]
            address = network(connection.peer[0])
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def asked(self, peer: tuple[str, int]) -> None:
        """A whole request came from there."""
        if connection := self.open.get(peer[:2]):
            connection.asked = True

    def read_by(self, peer: tuple[str, int], reader: str) -> None:
        """What is asked for there from now on goes to this reader."""
        if connection := self.open.get(peer[:2]):
            connection.reader = reader

    def cut_readers(self, refused: Callable[[str], bool]) -> None:
        """Resets the connections of these readers, whatever they are receiving."""
        for connection in list(self.open.values()):
            if connection.reader is not None and refused(connection.reader):
                self._cut(connection)

    async def watching(self, _: object) -> AsyncIterator[None]:
        """For aiohttp's `cleanup_ctx`: looks at all connections while the server runs."""
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()

    async def _watch(self) -> None:
        look_s = min(LONGEST_LOOK_S, self.patience.headers_s / 10, self.patience.stall_s / 10)
        while True:
            await asyncio.sleep(look_s)
            now_s = time.monotonic()
            for connection in list(self.open.values()):
                if connection.fileno() == -1:
                    self.forget(connection)
                elif connection.useless(now_s, self.patience):
                    self._cut(connection)

    def _cut(self, connection: Connection) -> None:
        self.forget(connection)
        self.cut += 1
        connection.cut()


LISTENER = web.AppKey("listener", Listener)


def prefer_bbr(connection: socket.socket) -> str:
    """Returns the congestion control that is in use then; "unknown" where the system does not say."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "unknown"
    with suppress(OSError):  # not built in, or not allowed to this user
        connection.setsockopt(socket.IPPROTO_TCP, option, CONGESTION)
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()
    except OSError:
        return "unknown"


def network(address: str) -> str:
    """What one client has: an IPv4 address, or the /64 of an IPv6 address, of which everyone has 2**64."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(ip, IPv6Address):
        return address
    return str(ip.ipv4_mapped or IPv6Address(int(ip) >> 64 << 64))


def _progress(connection: socket.socket) -> int | None:
    """The bytes that the reader's system has taken so far, None where it has all that was sent, or nothing is known."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        unacked, acked_bytes, unsent_bytes = TCP_INFO.unpack_from(told)
    except (AttributeError, OSError, struct.error):
        return None
    return int(acked_bytes) if unacked or unsent_bytes else None
