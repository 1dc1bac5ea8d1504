from shoal.protocol.messages import StepReport

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Desk, open_pool


def groups(desk: Desk, step: int) -> list[tuple[str, int]]:
    batch = desk.pool.batches.of_step(step)
    assert batch.ready
    return [(group.submission, group.group) for group in batch.groups]


def test_a_batch_is_ready_when_it_is_full_of_useful_groups_oldest_first(desk: Desk) -> None:
    first = desk.accepted(useful=(False, True))
    second = desk.accepted(BOB)
    filling = desk.pool.batches.of_step(0)
    assert (filling.ready, filling.have, filling.need) == (False, 3, 4)
    third = desk.accepted()
    assert groups(desk, 0) == [(first.id, 1), (second.id, 0), (second.id, 1), (third.id, 0)]
    assert desk.pool.batches.of_step(1).have == 1, "what is left over waits for the next step"


def test_a_full_batch_never_changes(desk: Desk) -> None:
    desk.accepted()
    desk.accepted()
    before = desk.pool.batches.of_step(0)
    desk.accepted()
    desk.accepted()
    assert desk.pool.batches.of_step(0) == before
    assert desk.pool.batches.of_step(1).ready and not desk.pool.batches.of_step(2).ready


def test_leftovers_that_fill_further_batches_close_them_at_once(desk: Desk) -> None:
    desk.accepted(useful=(True,) * 11)
    assert [desk.pool.batches.of_step(step).ready for step in range(3)] == [True, True, False]
    assert desk.pool.batches.of_step(2).have == 3


def test_groups_are_taken_until_exactly_the_async_level(desk: Desk) -> None:
    desk.accepted(useful=(True,) * 3)  # version 0
    desk.publish(1, 2, 3)
    for version in (1, 2):
        desk.accepted(version=version, useful=(True,) * 4)
    assert desk.pool.status().step == 2, "three groups are left over"
    desk.accepted(version=2, useful=(True,))
    assert groups(desk, 2)[-1][0] == f"{ALICE[:16]}-000003"
    assert desk.pool.status().stale_groups == 0


def test_a_group_one_version_too_old_is_counted_stale_and_never_trained_on() -> None:
    desk = open_pool(async_level=1)
    desk.join(ALICE)
    desk.join(BOB)
    desk.join(VALIDATOR, "validator")
    desk.publish(0, 1, 2)
    old = desk.upload(BOB, 0)
    fresh = desk.upload(ALICE, 1)
    desk.claim(VALIDATOR)  # Bob's: its verdict is late
    desk.clock.now_s += 51
    desk.claim(OTHER_VALIDATOR)
    claim = desk.claim(VALIDATOR)
    assert claim is not None and claim.assignment.id == fresh.id
    desk.judge(fresh.id, useful=(True,) * 8)
    assert desk.pool.status().step == 2, "steps 0 and 1 are full: version 0 is too old for step 2"
    desk.judge(old.id, validator=OTHER_VALIDATOR)
    assert desk.pool.status().stale_groups == 2 and desk.pool.status().have == 0
    desk.accepted(version=2, useful=(True,) * 4)
    assert old.id not in {submission for submission, _ in groups(desk, 2)}


def test_a_step_after_the_last_says_that_the_run_is_over(desk: Desk) -> None:
    assert desk.pool.batches.of_step(6).finished and not desk.pool.batches.of_step(5).finished


def test_nothing_is_handed_out_when_every_batch_is_full(desk: Desk) -> None:
    desk.accepted(useful=(True,) * 12)
    desk.publish(1, 2, 3)
    desk.accepted(version=3, useful=(True,) * 12)
    assert "every batch is full" in desk.beat(version=3).waiting_for


def test_without_the_filter_every_group_is_trained_on_and_told_of_as_before() -> None:
    desk = open_pool(online_filter=False)
    desk.join(ALICE)
    desk.join(VALIDATOR, "validator")
    desk.publish(0)
    first, second = (desk.accepted(useful=(False, True)) for _ in range(2))
    assert groups(desk, 0) == [(first.id, 0), (first.id, 1), (second.id, 0), (second.id, 1)]
    desk.pool.learning.trained(StepReport(step=0, metrics={}, trained=[first.id, second.id]))
    assert desk.pool.history.after(0).metrics[0]["reward/zero_std_frac"] == 0.5
