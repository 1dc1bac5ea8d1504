"""Limits the rate of each client of a server with a token bucket, stored as how far the client is ahead of its rate.

Invariant: in any period a client receives at most its rate, a burst, and the requests started by then. At most MAX_CLIENTS
are stored, with two numbers each.
Called by `guard.Guard`, which checks before a request and charges the body when it starts.
Left out: throttling within a body, which would rule out `sendfile`; one rate across several relays.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_CLIENTS = 100_000
BURST_S = 10.0  # of its rate, by which a client may be ahead


class Rates:
    """How far each client is ahead of its rate, in bytes, decaying at `rate_Bps`. The least recent clients are forgotten."""

    def __init__(self, rate_Bps: float, *, clients: int = MAX_CLIENTS) -> None:
        self.rate_Bps, self.clients = rate_Bps, clients
        self._ahead: OrderedDict[str, tuple[float, float]] = OrderedDict()  # bytes, and when

    def wait_s(self, client: str, now_s: float) -> float:
        """The time this client must wait: zero unless it is ahead by more than a burst."""
        return max(0.0, self._ahead_bytes(client, now_s) / self.rate_Bps - BURST_S)

    def charge(self, client: str, size_bytes: int, now_s: float) -> None:
        self._ahead[client] = (self._ahead_bytes(client, now_s) + size_bytes, now_s)
        self._ahead.move_to_end(client)
        if len(self._ahead) > self.clients:
            self._ahead.popitem(last=False)

    def _ahead_bytes(self, client: str, now_s: float) -> float:
        ahead_bytes, then_s = self._ahead.get(client, (0.0, now_s))
        return max(0.0, ahead_bytes - self.rate_Bps * (now_s - then_s))
