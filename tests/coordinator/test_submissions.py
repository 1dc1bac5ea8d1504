import json

import pytest

from shoal.coordinator.database import PoolError
from shoal.protocol.messages import HARD, Reason

from .support import ALICE, BOB, CAROL, OTHER_VALIDATOR, VALIDATOR, Desk, open_pool, verdict

# --- uploading -------------------------------------------------------------------------------------------------------


def test_after_its_deadline_a_task_is_refused_and_another_is_given(desk: Desk) -> None:
    late = desk.task()
    desk.clock.now_s += 100.5
    with pytest.raises(PoolError, match="after its deadline") as caught:
        desk.pool.submissions.uploaded(ALICE, late.id, "9" * 64)
    assert caught.value.status == 409
    assert desk.task().number == 1
    with pytest.raises(PoolError, match="expired"):
        desk.pool.submissions.uploaded(ALICE, late.id, "9" * 64)


def test_a_task_can_be_uploaded_once_and_only_by_its_worker(desk: Desk) -> None:
    task = desk.task()
    with pytest.raises(PoolError, match="another worker") as caught:
        desk.pool.submissions.uploaded(BOB, task.id, "9" * 64)
    assert caught.value.status == 403
    desk.pool.submissions.uploaded(ALICE, task.id, "9" * 64)
    with pytest.raises(PoolError, match="uploaded, not open"):
        desk.pool.submissions.uploaded(ALICE, task.id, "7" * 64)
    assert desk.pool.submissions.hashes(task.id) == ("9" * 64, "")


def test_an_unknown_submission_is_not_found(desk: Desk) -> None:
    with pytest.raises(PoolError, match="no submission") as caught:
        desk.pool.submissions.may_upload(ALICE, "0" * 16 + "-000000")
    assert caught.value.status == 404


def test_a_file_of_a_version_no_batch_can_take_any_more_is_refused(desk: Desk) -> None:
    late = desk.task(BOB, 0)  # held back until its version is too old, when relays may no longer have it either
    for version in (0, 0, 0):
        desk.accepted(version=version)
        desk.clock.now_s += 31  # Bob is silent: his task is not counted on
        desk.accepted(version=version)
    assert desk.pool.status().step == 3
    with pytest.raises(PoolError, match="version 0, older than 1") as caught:
        desk.pool.submissions.uploaded(BOB, late.id, "9" * 64)
    assert caught.value.status == 409


# --- checking --------------------------------------------------------------------------------------------------------


def test_claims_come_oldest_first_and_one_validator_holds_each(desk: Desk) -> None:
    first, second = desk.upload(ALICE), desk.upload(BOB)
    one, two = desk.claim(VALIDATOR), desk.claim(OTHER_VALIDATOR)
    assert one is not None and two is not None
    assert (one.assignment.id, one.worker) == (first.id, ALICE)
    assert two.assignment.id == second.id
    assert desk.claim("d" * 64) is None


def test_several_are_claimed_at_once_oldest_first_and_of_one_version_only() -> None:
    desk = open_pool(prompts_per_step=20)
    for key in (ALICE, BOB, CAROL):
        desk.join(key)
    desk.publish(0, 1)
    tasks = [desk.upload(ALICE, 0), desk.upload(BOB, 1), desk.upload(CAROL, 0)]
    claims = desk.claims(VALIDATOR, 4)
    assert [claim.assignment.id for claim in claims] == [tasks[0].id, tasks[2].id]
    assert {claim.lease_s for claim in claims} == {desk.clock.now_s + 50}
    assert [claim.assignment.id for claim in desk.claims(OTHER_VALIDATOR, 4)] == [tasks[1].id]
    assert desk.claims("d" * 64, 4) == []


def test_no_more_are_claimed_than_were_asked_for(desk: Desk) -> None:
    first, second = desk.upload(ALICE), desk.upload(BOB)
    assert [claim.assignment.id for claim in desk.claims(VALIDATOR, 1)] == [first.id]
    assert [claim.assignment.id for claim in desk.claims(OTHER_VALIDATOR, 2)] == [second.id]


def test_leases_of_several_run_out_together_and_those_that_were_judged_are_kept(desk: Desk) -> None:
    first, second = desk.upload(ALICE), desk.upload(BOB)
    desk.claims(VALIDATOR, 2)
    desk.judge(first.id)
    desk.clock.now_s += 50.5
    assert [claim.assignment.id for claim in desk.claims(OTHER_VALIDATOR, 2)] == [second.id]


def test_a_restarted_validator_gets_its_claim_again(desk: Desk) -> None:
    desk.upload()
    one, again = desk.claim(VALIDATOR), desk.claim(VALIDATOR)
    assert one is not None and again is not None and again.assignment == one.assignment


def test_a_claim_that_ran_out_goes_to_another_validator_whose_verdict_alone_counts(desk: Desk) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)
    assert desk.claim(OTHER_VALIDATOR) is None
    desk.clock.now_s += 50.5
    again = desk.claim(OTHER_VALIDATOR)
    assert again is not None and again.assignment.id == task.id
    with pytest.raises(PoolError, match="not claimed by this validator") as caught:
        desk.judge(task.id)
    assert caught.value.status == 409
    desk.judge(task.id, validator=OTHER_VALIDATOR)
    with pytest.raises(PoolError, match="accepted and not claimed"):
        desk.judge(task.id)


def test_a_verdict_may_come_twice_and_counts_once(desk: Desk) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)
    desk.pool.submissions.accepted_stored(VALIDATOR, task.id, "8" * 64)
    for _ in range(2):
        desk.pool.submissions.judge(VALIDATOR, verdict(task.id, None, (True, True), "5" * 64))
    assert desk.kinds().count("accepted") == 1
    assert desk.pool.status().have == 2


def test_accepting_needs_the_accepted_file_that_was_stored(desk: Desk) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)
    with pytest.raises(PoolError, match="store the accepted file"):
        desk.pool.submissions.judge(VALIDATOR, verdict(task.id, None, (True, True), "5" * 64))
    desk.pool.submissions.accepted_stored(VALIDATOR, task.id, "7" * 64)
    with pytest.raises(PoolError, match="store the accepted file"):
        desk.pool.submissions.judge(VALIDATOR, verdict(task.id, None, (True, True), "5" * 64))
    assert desk.pool.status().have == 0 and "accepted" not in desk.kinds()


def test_only_who_holds_the_claim_stores_the_accepted_file(desk: Desk) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)
    with pytest.raises(PoolError, match="not claimed"):
        desk.pool.submissions.accepted_stored(OTHER_VALIDATOR, task.id, "8" * 64)


def test_rollouts_accepted_before_are_rejected_as_replayed_though_the_validator_did_not_know(desk: Desk) -> None:
    first, second = desk.upload(ALICE), desk.upload(BOB)
    desk.claim(VALIDATOR)
    desk.claim(OTHER_VALIDATOR)
    desk.judge(first.id, content="5" * 64)
    desk.judge(second.id, content="5" * 64, validator=OTHER_VALIDATOR)
    assert desk.pool.submissions.content_owner("5" * 64).submission == first.id
    assert desk.pool.status().reject_reasons == {"replayed": 1}
    assert desk.pool.status().have == 2, "the copy's groups are not credited"
    assert desk.beat(BOB, 0).state == "evicted"


@pytest.mark.parametrize("reason", sorted(Reason))
def test_a_rejected_copy_does_not_own_its_content_so_the_author_is_not_slashed(desk: Desk, reason: Reason) -> None:
    """Seeds are public: an attacker can compute an honest worker's next rollouts and upload them first."""
    copy, original = desk.upload(BOB), desk.upload(ALICE)
    desk.claims(VALIDATOR, 2)
    desk.judge(copy.id, reason, content="5" * 64)
    assert desk.pool.submissions.content_owner("5" * 64).submission is None
    desk.judge(original.id, content="5" * 64)
    assert desk.pool.submissions.content_owner("5" * 64).submission == original.id
    assert "worker-a" not in desk.pool.status().slashed
    assert [entry.kind for entry in desk.pool.db.ledger.entries()][-1] == "accepted"


def test_nobody_owns_rollouts_that_were_not_judged(desk: Desk) -> None:
    assert desk.pool.submissions.content_owner("5" * 64).submission is None


@pytest.mark.parametrize("reason", sorted(HARD))
def test_a_hard_rejection_evicts_and_slashes(desk: Desk, reason: Reason) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)
    desk.judge(task.id, reason)
    assert desk.beat().state == "evicted"
    assert desk.kinds()[-2:] == ["rejected", "slashed"]
    body = json.loads(next(desk.pool.db.ledger.entries(kind="slashed")).body)
    told = {"submission": task.id, "worker": ALICE, "step": 0, "file": "9" * 64, "full": True, "reason": reason}
    assert body == told
    assert desk.pool.status().slashed == ["worker-a"]


@pytest.mark.parametrize("reason", sorted(frozenset(Reason) - HARD))
def test_a_soft_rejection_costs_the_submission_only(desk: Desk, reason: Reason) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)
    desk.judge(task.id, reason)
    assert desk.kinds()[-1] == "rejected" and "slashed" not in desk.kinds()
    assert desk.task().number == 1


def test_one_is_slashed_once_and_loses_its_open_task(desk: Desk) -> None:
    desk.upload()
    second = desk.upload()
    desk.claim(VALIDATOR)
    desk.judge(f"{ALICE[:16]}-000000", Reason.PROOF)
    desk.claim(VALIDATOR)
    desk.judge(second.id, Reason.PROOF)
    assert desk.kinds().count("slashed") == 1 and desk.kinds().count("rejected") == 2


def test_an_evicted_worker_cannot_hand_in_the_task_it_still_held(desk: Desk) -> None:
    lied = desk.upload()
    held = desk.task()
    desk.claim(VALIDATOR)
    desk.judge(lied.id, Reason.PROOF)
    with pytest.raises(PoolError, match="expired"):
        desk.pool.submissions.uploaded(ALICE, held.id, "9" * 64)
