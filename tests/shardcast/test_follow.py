"""`Follower` and `fetch_published`, tested with a stub client."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.shardcast import FetchError
from shoal.shardcast.fetch import client as client_module
from shoal.shardcast.fetch.client import Follower, fetch_published


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(client_module, "POLL_S", 0.005)


class Relays:
    """A client whose relays have some versions, and may fail."""

    def __init__(self, *versions: int) -> None:
        self.versions = set(versions)
        self.error: Exception | None = None
        self.requests: list[int] = []
        self.hold = threading.Event()
        self.hold.set()

    def fetch(self, version: int | None = None, *, digest: str | None = None) -> Any:
        assert version is not None
        self.requests.append(version)
        self.hold.wait(5)
        if self.error:
            raise self.error
        if version not in self.versions:
            raise FetchError(f"no relay has version {version}")
        return Path(f"v{version}"), SimpleNamespace(version=version, digest=digest)


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true in time"
        time.sleep(0.005)


def held(follower: Follower) -> int | None:
    newest = follower.newest()
    return newest[1].version if newest else None


def test_a_follower_fetches_each_newest_version_once_and_never_goes_back():
    relays = Relays(0, 3, 5)
    wanted: int | None = None
    with Follower(lambda: wanted, lambda: relays) as follower:
        time.sleep(0.05)
        assert (held(follower), follower.last_error, relays.requests) == (None, "", [])
        wanted = 0
        until(lambda: held(follower) == 0)
        relays.hold.clear()
        wanted = 5
        until(lambda: relays.requests == [0, 5])
        assert held(follower) == 0, "the previous version must be held until the next one is complete"
        relays.hold.set()
        until(lambda: held(follower) == 5)
        wanted = 3
        time.sleep(0.05)
        assert held(follower) == 5
    assert relays.requests == [0, 5]
    follower._thread.join(2)
    assert not follower._thread.is_alive()


@pytest.mark.parametrize("error", [FetchError("no relay answered"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("without_client", [False, True])
def test_a_follower_reports_a_failure_and_tries_again(error, without_client, caplog):
    relays = Relays(2)
    relays.error = error

    def client() -> Relays:
        if relays.error and without_client:
            raise relays.error
        return relays

    with Follower(lambda: 2, client) as follower:
        until(lambda: follower.last_error == str(error))
        assert follower.newest() is None
        until(lambda: len(relays.requests) > 2 or without_client)
        assert caplog.messages == [f"cannot fetch version 2 yet: {error}"], "the log has the reason once"
        relays.error = None
        until(lambda: held(follower) == 2)
        until(lambda: follower.last_error == "")


def test_fetch_published_waits_for_a_limited_time_for_the_version():
    relays = Relays()
    threading.Timer(0.05, lambda: relays.versions.add(3)).start()
    folder, manifest = fetch_published(relays, 3, digest="d", wait_s=5)
    assert (folder, manifest.version, manifest.digest) == (Path("v3"), 3, "d")
    assert len(relays.requests) > 1
    started_s = time.monotonic()
    with pytest.raises(FetchError, match="no relay has version 3"):
        fetch_published(Relays(), 3, wait_s=0.05)
    assert time.monotonic() - started_s < 2
