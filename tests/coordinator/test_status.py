"""The status tells whether the accepted groups teach anything."""

from .support import Desk, advance


def test_newest_groups_with_equal_rewards_are_counted(desk: Desk) -> None:
    assert desk.pool.status().signal.model_dump() == {
        "groups": 0, "useful": 0, "flat": 0, "lowest": None, "highest": None,
    }  # fmt: skip
    desk.accepted(useful=(True, False))
    for _ in range(2):
        desk.accepted(useful=(False, False))
    signal = desk.pool.status().signal
    assert (signal.groups, signal.useful, signal.flat) == (6, 1, 5)
    assert signal.lowest is not None and signal.lowest == signal.highest
    desk.accepted(useful=(True, True))
    assert desk.pool.status().signal.flat == 0


def test_groups_are_counted_for_the_open_step(desk: Desk) -> None:
    advance(desk, 1)
    desk.accepted(useful=(False, False))
    assert (desk.pool.status().signal.groups, desk.pool.status().signal.useful) == (2, 0)
