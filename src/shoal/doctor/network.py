"""Whether this machine reaches the pool: its coordinator, its relays, and how far the clocks are apart.

Invariant: only routes that are open to all are asked (`/healthz`, `/v1/run`): an invite is read, never used up. The run's
description is believed only if the key in the invite signed it. Called by `shoal doctor`.
Left out: bandwidth, and reaching this machine from outside, which only the outside can try.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import httpx
from pydantic import ValidationError

from shoal import config as config_module
from shoal.config import Config, ConfigError
from shoal.protocol.bodies import get
from shoal.protocol.clock import PoolClock
from shoal.protocol.identity import IdentityError, Signed
from shoal.protocol.invite import Invite
from shoal.protocol.messages import VERSION, RunDescriptor, Status

TIMEOUT_S = 3.0
MOST_BYTES = 16 << 20  # of an answer
MOST_RELAYS = 4  # that are asked: a few seconds even if none answers


@dataclass(frozen=True)
class Reach:
    """What answered at one address."""

    url: str
    what: str  # "coordinator" or "relay"
    error: str = ""
    took_s: float = 0.0  # the second request: the first one also connects
    behind_s: float = (
        0.0  # of this machine's clock to the answer's date; 0 if within what a date of whole seconds shows
    )
    run: str = ""


@dataclass(frozen=True)
class Targets:
    coordinator: str = ""
    relays: list[str] = field(default_factory=list)
    invite: Invite | None = None


def look(
    targets: Targets, client: httpx.Client, clock: Callable[[], float] = time.time
) -> tuple[list[Reach], Config | None]:
    """What answers, and the run's config where an invite proves it. If it does, the pool's relays are asked too."""
    found, config = [], None
    if targets.coordinator:
        reach = _ask(targets.coordinator, "coordinator", client, clock)
        if not reach.error and targets.invite is not None:
            config, error = _config(targets.coordinator, targets.invite, client)
            reach = Reach(reach.url, reach.what, error, reach.took_s, reach.behind_s, reach.run)
        found.append(reach)
    relays = targets.relays or (_announced(targets.coordinator, client) if config is not None else [])
    return found + [_ask(url, "relay", client, clock) for url in relays[:MOST_RELAYS]], config


def _ask(url: str, what: str, client: httpx.Client, clock: Callable[[], float]) -> Reach:
    pool_clock, took_s = PoolClock(clock), 0.0
    try:
        for _ in range(2):
            asked_s, start_s = clock(), time.perf_counter()
            answer = get(client, f"{url.rstrip('/')}/healthz", MOST_BYTES, timeout=TIMEOUT_S).raise_for_status()
            took_s = time.perf_counter() - start_s
            if "date" in answer.headers:
                created_s = int(parsedate_to_datetime(answer.headers["date"]).timestamp())
                pool_clock.heard(created_s, asked_s, clock())
        said = answer.json()
        if what == "coordinator" and said.get("protocol") != VERSION:
            return Reach(url, what, f"it is not a Shoal coordinator of protocol {VERSION}: {str(said)[:80]}")
        run = str(said.get("run", "")) if isinstance(said, dict) else ""
        return Reach(url, what, "", took_s, pool_clock.offset_s, run)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError, RecursionError) as error:
        return Reach(url, what, str(error).rstrip(".") or type(error).__name__)


def _config(url: str, invite: Invite, client: httpx.Client) -> tuple[Config | None, str]:
    """The run's config, and why it is not believed."""
    try:
        answer = get(client, f"{url}/v1/run", MOST_BYTES, timeout=TIMEOUT_S).raise_for_status()
        text = Signed.model_validate_json(answer.content).open(invite.key, domain="run")
        descriptor = RunDescriptor.model_validate_json(text)
        if descriptor.run != invite.run:
            return None, f"it serves the run {descriptor.run}, and the invite is for {invite.run}"
        return config_module.parse(descriptor.config, source="run descriptor"), ""
    except (httpx.HTTPError, IdentityError, ValidationError, ConfigError) as error:
        return None, f"its description of the run cannot be trusted: {error}"


def _announced(url: str, client: httpx.Client) -> list[str]:
    """Relays of the pool, by the coordinator's status; none if it cannot be read."""
    try:
        answer = get(client, f"{url}/v1/status", MOST_BYTES, timeout=TIMEOUT_S).raise_for_status()
        nodes = Status.model_validate_json(answer.content).nodes
    except (httpx.HTTPError, ValidationError):
        return []
    return [node.url for node in nodes if node.role == "relay" and node.url and not node.evicted]
