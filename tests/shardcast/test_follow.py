"""The follower: it names only what is here, keeps trying, and says why something is not."""

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
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "POLL_S", 0.005)


class Relays:
    """A client of relays that hold some versions, and may fail."""

    def __init__(self, *versions: int) -> None:
        self.versions = set(versions)
        self.error: Exception | None = None
        self.asked: list[int] = []
        self.hold = threading.Event()
        self.hold.set()

    def fetch(self, version: int | None = None, *, digest: str | None = None) -> Any:
        assert version is not None
        self.asked.append(version)
        self.hold.wait(5)
        if self.error:
            raise self.error
        if version not in self.versions:
            raise FetchError(f"no relay has version {version}")
        return Path(f"v{version}"), SimpleNamespace(version=version, digest=digest)


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


def held(follower: Follower) -> int | None:
    newest = follower.newest()
    return newest[1].version if newest else None


def test_it_follows_the_newest_version() -> None:
    relays, newest = Relays(0, 1, 5), [0]
    with Follower(lambda: newest[0], lambda: relays) as follower:
        until(lambda: held(follower) == 0)
        newest[0] = 5
        until(lambda: held(follower) == 5)
    assert relays.asked == [0, 5]  # each once, and none that nobody needs


def test_it_waits_where_nothing_is_published() -> None:
    relays = Relays()
    with Follower(lambda: None, lambda: relays) as follower:
        time.sleep(0.05)
        assert follower.newest() is None and follower.last_error == ""
    assert relays.asked == []


def test_the_version_before_is_named_until_the_next_is_here() -> None:
    relays, newest = Relays(0, 1), [0]
    with Follower(lambda: newest[0], lambda: relays) as follower:
        until(lambda: held(follower) == 0)
        relays.hold.clear()
        newest[0] = 1
        until(lambda: relays.asked == [0, 1])
        assert held(follower) == 0
        relays.hold.set()
        until(lambda: held(follower) == 1)


def test_it_never_goes_back() -> None:
    relays, newest = Relays(3, 4), [4]
    with Follower(lambda: newest[0], lambda: relays) as follower:
        until(lambda: held(follower) == 4)
        newest[0] = 3
        time.sleep(0.05)
        assert held(follower) == 4
    assert relays.asked == [4]


@pytest.mark.parametrize("error", [FetchError("no relay answered"), OSError(28, "No space left on device")])
def test_a_failure_is_told_and_tried_again(error: Exception) -> None:
    relays = Relays(2)
    relays.error = error
    with Follower(lambda: 2, lambda: relays) as follower:
        until(lambda: len(relays.asked) > 1)
        assert follower.newest() is None and follower.last_error == str(error)
        relays.error = None
        until(lambda: held(follower) == 2)
        until(lambda: follower.last_error == "")


def test_relays_that_are_all_gone_for_a_moment_do_not_end_it() -> None:
    relays, known = Relays(2), [False]

    def client() -> Relays:
        if not known[0]:
            raise FetchError("no relay is known")
        return relays

    with Follower(lambda: 2, client) as follower:
        until(lambda: follower.last_error == "no relay is known")
        known[0] = True
        until(lambda: held(follower) == 2)


def test_it_ends_with_its_block() -> None:
    with Follower(lambda: None, lambda: Relays()) as follower:
        pass
    follower._thread.join(2)
    assert not follower._thread.is_alive()


def test_a_published_version_is_waited_for() -> None:
    relays = Relays()
    threading.Timer(0.05, lambda: relays.versions.add(3)).start()
    folder, manifest = fetch_published(relays, 3, digest="d", wait_s=5)
    assert (folder, manifest.version, manifest.digest) == (Path("v3"), 3, "d")
    assert len(relays.asked) > 1


def test_the_wait_has_an_end_that_says_why() -> None:
    started_s = time.monotonic()
    with pytest.raises(FetchError, match="no relay has version 3"):
        fetch_published(Relays(), 3, wait_s=0.05)
    assert time.monotonic() - started_s < 2
