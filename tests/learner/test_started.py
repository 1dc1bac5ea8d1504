"""What the leader of several ranks tells the others before they compute."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from shoal.errors import ShoalError
from shoal.learner.ranks import Ranks
from shoal.learner.started import LeaderError, from_leader


class Rank:
    """One of two ranks. `wire`: what was broadcast."""

    size = 2

    def __init__(self, wire: list[bytes], *, leads: bool) -> None:
        self.wire, self.leads = wire, leads

    def broadcast(self, message: bytes | None) -> bytes:
        if self.leads:
            assert message is not None
            self.wire.append(message)
            return message
        return self.wire.pop(0)


def told(rank: Any, read: Callable[[], int]) -> int:
    return from_leader(cast(Ranks, rank), read, lambda found: str(found).encode(), lambda data: int(data))


def never(*_: Any) -> Any:
    raise AssertionError("only the leader reads")


def refuse() -> int:
    raise ShoalError("no such file")


def test_every_rank_has_what_the_leader_read() -> None:
    wire: list[bytes] = []
    assert told(Rank(wire, leads=True), lambda: 7) == 7
    assert told(Rank(wire, leads=False), never) == 7 and not wire


def test_an_error_of_the_leader_ends_the_others_with_its_message() -> None:
    wire: list[bytes] = []
    with pytest.raises(ShoalError, match="^no such file"):
        told(Rank(wire, leads=True), refuse)
    with pytest.raises(LeaderError, match="rank 0 ended: no such file"):
        told(Rank(wire, leads=False), never)


def test_one_rank_alone_encodes_nothing() -> None:
    assert from_leader(Ranks(), lambda: 7, never, never) == 7
