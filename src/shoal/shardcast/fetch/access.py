"""How a downloader reaches servers: whose signature, which timeouts and pass, and what it learned of each server.

Called by client and relay, which open `Sources` with it. It outlives single downloads.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.shardcast.fetch.reach import Reach
from shoal.shardcast.fetch.standing import Standing
from shoal.shardcast.format.newest import Newest, SignedNewest, latest


@dataclass(frozen=True)
class Limits:
    """Timeouts of a downloader, in seconds."""

    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 30.0  # until the next byte
    answer_timeout_s: float = 30.0  # for one listing or manifest
    patience_s: float = 15.0  # for one shard while another server could be asked instead; grows on slow links
    first_rest_s: float = 0.1  # of a server after a failure; doubles with each one
    longest_rest_s: float = 2.0


@dataclass(frozen=True)
class Arrival:
    """A version that has come, complete and verified."""

    version: int
    size_bytes: int  # that were transferred
    took_s: float
    at_s: float  # when it was complete, on this process's monotonic clock
    rates_Bps: dict[str, float]  # by sender's URL
    behind_s: float  # from its publication until it was complete here


@dataclass
class Access:
    """How a downloader reaches servers, and what it has learned about them. Outlives single downloads."""

    public_key: str  # the learner's, ed25519, hex
    run: str | None = None
    limits: Limits = field(default_factory=Limits)
    token: Callable[[str], str] | None = None  # a reader's pass for the server at this URL, see `serve.passes`
    tls: ssl.SSLContext | None = None
    reach: Reach | None = None  # of addresses that others name; None: any, the user named them
    standings: dict[str, Standing] = field(default_factory=dict)  # by URL
    on_fetched: Callable[[Arrival], None] = lambda arrival: None
    newest: Newest | None = None  # the origin's latest statement, of all that servers passed on

    def heard(self, signed: SignedNewest | None) -> None:
        if signed is not None:
            self.newest = latest(self.newest, signed.open(self.public_key, run=self.run), time.time())
