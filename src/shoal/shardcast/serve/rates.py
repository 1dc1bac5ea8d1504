"""How much each client of a server may take: a token bucket for each, kept as how far it is ahead of its rate.

Invariant: over any time a client is sent at most its rate, a burst, and the requests it had begun by then; what is held
of one is two numbers, and of MAX_CLIENTS at most.
Called by `guard.Guard`, which asks before a request and charges its body when that begins.
Left out: slowing a body down while it is sent, which would cost `sendfile`; one rate over several relays.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_CLIENTS = 100_000
BURST_S = 10.0  # how much of its rate a client may be ahead


class Rates:
    """What each client is ahead of its rate, in bytes, decaying at `rate_Bps`; the least recent ones are forgotten."""

    def __init__(self, rate_Bps: float, *, clients: int = MAX_CLIENTS) -> None:
        self.rate_Bps, self.clients = rate_Bps, clients
        self._ahead: OrderedDict[str, tuple[float, float]] = OrderedDict()  # bytes, as of when

    def wait_s(self, client: str, now_s: float) -> float:
        """How long this client has to wait: zero unless it is ahead by more than a burst."""
        return max(0.0, self._ahead_bytes(client, now_s) / self.rate_Bps - BURST_S)

    def charge(self, client: str, size_bytes: int, now_s: float) -> None:
        self._ahead[client] = (self._ahead_bytes(client, now_s) + size_bytes, now_s)
        self._ahead.move_to_end(client)
        if len(self._ahead) > self.clients:
            self._ahead.popitem(last=False)

    def _ahead_bytes(self, client: str, now_s: float) -> float:
        ahead_bytes, then_s = self._ahead.get(client, (0.0, now_s))
        return max(0.0, ahead_bytes - self.rate_Bps * (now_s - then_s))
