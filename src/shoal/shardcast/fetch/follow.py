"""Fetches each newest version in the background, so that downloads overlap with work on the version before.

Invariant: `newest()` returns only folders that the client has completely verified.
Called by the worker (`Follower`), and by validator and evaluator for the one version they need (`fetch_published`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoal.shardcast.fetch.client import Client
from shoal.shardcast.fetch.errors import FetchError
from shoal.shardcast.format.manifest import Manifest

POLL_S = 0.2


def fetch_published(
    client: Client, version: int, *, digest: str | None = None, wait_s: float = 120
) -> tuple[Path, Manifest]:
    """Fetches a version that is published but may not have reached a relay yet. Raises FetchError after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return client.fetch(version, digest=digest)
        except FetchError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


class Follower:
    """`wanted` returns the newest published version, or None. `client` makes a client for the currently known relays."""

    def __init__(self, wanted: Callable[[], int | None], client: Callable[[], Client]) -> None:
        self.wanted = wanted
        self.client = client
        self.last_error = ""  # why the newest version could not be fetched
        self._held: tuple[Path, Manifest] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="follower")

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest version on this machine, complete and verified."""
        return self._held

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            wanted = self.wanted()
            if wanted is None or (self._held and self._held[1].version >= wanted):
                continue
            try:
                self._held = self.client().fetch(wanted)
                self.last_error = ""
            except (FetchError, OSError) as error:
                self.last_error = str(error)  # shown by the caller; the next round tries again
