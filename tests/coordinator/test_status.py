"""The status tells whether the accepted groups teach anything."""

import pytest

from .support import Harness, advance

pytestmark = pytest.mark.usefixtures("every_database_slow")


def test_newest_groups_with_equal_rewards_are_counted(harness: Harness) -> None:
    assert harness.status().signal.model_dump() == {
        "groups": 0, "useful": 0, "flat": 0, "lowest": None, "highest": None,
    }  # fmt: skip
    harness.accepted(useful=(True, False))
    for _ in range(2):
        harness.accepted(useful=(False, False))
    signal = harness.status().signal
    assert (signal.groups, signal.useful, signal.flat) == (6, 1, 5)
    assert signal.lowest is not None and signal.lowest == signal.highest
    harness.accepted(useful=(True, True))
    assert harness.status().signal.flat == 0


def test_groups_are_counted_for_the_open_step(harness: Harness) -> None:
    advance(harness, 1)
    harness.accepted(useful=(False, False))
    assert (harness.status().signal.groups, harness.status().signal.useful) == (2, 0)
