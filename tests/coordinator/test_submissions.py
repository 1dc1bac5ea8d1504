import ast
import json
import logging
from pathlib import Path

import pytest

from shoal.coordinator.database import PoolError
from shoal.evidence import Process
from shoal.protocol.messages import HARD, LEASE_S, Heartbeat, Reason, Replay, Stats

from .support import (
    ACCEPTED_FILE,
    ALICE,
    BOB,
    CAROL,
    OTHER_VALIDATOR,
    THIRD_VALIDATOR,
    VALIDATOR,
    Harness,
    open_pool,
    staffed_pool,
    verdict,
)

pytestmark = pytest.mark.usefixtures("every_database_slow")

# --- uploading -------------------------------------------------------------------------------------------------------


def test_a_task_may_be_uploaded_late_until_its_worker_gets_another(harness: Harness) -> None:
    late = harness.task()
    harness.clock.now_s += 600.5
    harness.pool.assignments.uploaded(ALICE, late.id, "9" * 64)
    held = harness.task()
    harness.clock.now_s += 600.5
    assert "missed tasks in a row: 1" in harness.beat().waiting_for
    with pytest.raises(PoolError, match="expired, not open") as caught:
        harness.pool.assignments.uploaded(ALICE, held.id, "9" * 64)
    assert caught.value.status == 409
    harness.clock.now_s += 600
    assert harness.task().number == held.number + 1


def test_a_task_can_be_uploaded_once_and_only_by_its_worker(harness: Harness) -> None:
    task = harness.task()
    with pytest.raises(PoolError, match="another worker") as caught:
        harness.pool.assignments.uploaded(BOB, task.id, "9" * 64)
    assert caught.value.status == 403
    harness.pool.assignments.uploaded(ALICE, task.id, "9" * 64)
    with pytest.raises(PoolError, match="uploaded, not open"):
        harness.pool.assignments.uploaded(ALICE, task.id, "7" * 64)
    assert harness.pool.judgement.hashes(task.id) == ("9" * 64, "")


def test_a_file_of_a_version_too_old_for_any_batch_is_refused(harness: Harness) -> None:
    late = harness.task(BOB, 0)  # delayed until its version is too old
    for version in (0, 0, 0):
        harness.accepted(version=version)
        harness.clock.now_s += 31  # so the task of Bob, who is silent, does not count as in progress
        harness.accepted(version=version)
    assert harness.status().step == 3
    with pytest.raises(PoolError, match="version 0, older than 1") as caught:
        harness.pool.assignments.uploaded(BOB, late.id, "9" * 64)
    assert caught.value.status == 409
    assert harness.pool.db.submissions.count_by_state()["stale"] == 1
    harness.publish(1)
    assert harness.task(BOB, 1).number == 1, "a late upload must not count as missed, so Bob must not have to rest"


# --- checking --------------------------------------------------------------------------------------------------------


def test_several_submissions_of_one_version_are_claimed_at_once_oldest_first() -> None:
    harness = open_pool(prompts_per_step=20)
    for key in (ALICE, BOB, CAROL):
        harness.join(key)
    harness.publish(0, 1)
    tasks = [harness.upload(ALICE, 0), harness.upload(BOB, 1), harness.upload(CAROL, 0)]
    claims = harness.claims(VALIDATOR, 4)
    assert [claim.assignment.id for claim in claims] == [tasks[0].id, tasks[2].id]
    assert {claim.lease_s for claim in claims} == {harness.clock.now_s + LEASE_S}
    assert [claim.assignment.id for claim in harness.claims(OTHER_VALIDATOR, 4)] == [tasks[1].id]
    assert harness.claims("d" * 64, 4) == []


def test_an_expired_claim_goes_to_another_validator_whose_verdict_alone_counts(harness: Harness) -> None:
    task = harness.upload()
    harness.claim(VALIDATOR)
    assert harness.claim(OTHER_VALIDATOR) is None
    harness.clock.now_s += 300.5
    again = harness.claim(OTHER_VALIDATOR)
    assert again is not None and again.assignment.id == task.id
    with pytest.raises(PoolError, match="not claimed by this validator") as caught:
        harness.judge(task.id)
    assert caught.value.status == 409
    harness.judge(task.id, validator=OTHER_VALIDATOR)
    with pytest.raises(PoolError, match="accepted and not claimed"):
        harness.judge(task.id)


def test_a_validator_that_claims_again_and_again_keeps_no_submission_from_the_others(harness: Harness) -> None:
    task = harness.upload()
    first = harness.claimed()
    harness.clock.now_s += 200
    assert harness.claimed().lease_s == first.lease_s, "a repeated claim must not extend the lease"
    harness.clock.now_s += 100.5
    assert harness.claim() is not None, "without another live validator, the same one may claim again"
    harness.clock.now_s += 300.5
    harness.beat(VALIDATOR)
    harness.beat(OTHER_VALIDATOR)
    assert harness.claim() is None
    other = harness.claim(OTHER_VALIDATOR)
    assert other is not None and other.assignment.id == task.id


def test_a_verdict_cannot_credit_more_than_the_task_allows(harness: Harness) -> None:
    task = harness.upload()
    harness.claimed()
    harness.pool.judgement.accepted_stored(VALIDATOR, task.id, ACCEPTED_FILE)
    sampling = harness.pool.config.sampling
    most = sampling.group_size * sampling.max_tokens
    given = verdict(task.id, None, (True,) * task.groups)
    more = given.groups[0].model_copy(update={"tokens": most + 1})
    for groups in ([*given.groups, given.groups[0]], [more, *given.groups[1:]]):
        with pytest.raises(PoolError, match="more groups or tokens than its task allows"):
            harness.pool.judgement.judge(VALIDATOR, verdict(task.id, groups=groups))
    for tokens, mismatched in ((2 * most + 1, 0), (0, 2**53 - 1)):
        with pytest.raises(PoolError, match="more groups or tokens than its task allows"):
            replay = Replay(tokens=tokens, mismatched=mismatched)
            harness.pool.judgement.judge(VALIDATOR, verdict(task.id, replay=replay))
    full = given.groups[0].model_copy(update={"tokens": most})
    harness.pool.judgement.judge(VALIDATOR, verdict(task.id, groups=[full, *given.groups[1:]]))
    assert harness.state(task.id) == "accepted"


def test_a_submission_expires_when_relays_no_longer_hold_its_version(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a validator that claims it would wait for weights that nobody serves."""
    harness = open_pool(prompts_per_step=20)
    for key in (ALICE, BOB):
        harness.join(key)
    harness.publish(0, 1)
    old, young = harness.upload(ALICE, 0), harness.upload(BOB, 1)
    assert [claim.assignment.id for claim in harness.claims(VALIDATOR, 4)] == [old.id]
    harness.publish(2, 3, 4)  # five versions, as many as relays keep
    assert [claim.assignment.id for claim in harness.claims(VALIDATOR, 4)] == [old.id]
    harness.publish(5)
    with caplog.at_level(logging.INFO):
        assert [claim.assignment.id for claim in harness.claims(OTHER_VALIDATOR, 4)] == [young.id]
        assert [claim.assignment.id for claim in harness.claims(VALIDATOR, 4)] == [old.id]
    assert caplog.messages == [], "a submission that a validator still holds must not expire"
    harness.clock.now_s += 2 * LEASE_S + 1  # for the last LEASE_S another validator could have claimed it
    with caplog.at_level(logging.INFO):
        assert [claim.assignment.id for claim in harness.claims(VALIDATOR, 4)] == [young.id]
    assert caplog.messages == [f"{old.id} by worker-a expired unchecked: relays no longer hold version 0"]
    assert harness.pool.db.submissions.count_by_state() == {"expired": 1, "validating": 1}
    assert harness.task(ALICE, 5).number == 1


@pytest.mark.parametrize("reason", [None, Reason.PROOF])
def test_only_the_validator_with_the_claim_may_give_or_repeat_the_verdict(
    harness: Harness, reason: Reason | None
) -> None:
    task = harness.upload()
    harness.claim(VALIDATOR)
    with pytest.raises(PoolError, match="not claimed"):
        harness.pool.judgement.accepted_stored(OTHER_VALIDATOR, task.id, "8" * 64)
    with pytest.raises(PoolError, match="validating and not claimed by this validator"):
        harness.pool.judgement.judge(OTHER_VALIDATOR, verdict(task.id, Reason.PROOF, (), OTHER_VALIDATOR))
    harness.judge(task.id, reason)
    with pytest.raises(PoolError, match="ed and not claimed by this validator"):
        harness.pool.judgement.judge(THIRD_VALIDATOR, verdict(task.id, Reason.PROOF, (), THIRD_VALIDATOR))


def test_accepting_needs_the_stored_file_and_counts_once(harness: Harness) -> None:
    task = harness.upload()
    harness.claim(VALIDATOR)
    accepted = verdict(task.id)
    for stored in ("", "7" * 64):
        if stored:
            harness.pool.judgement.accepted_stored(VALIDATOR, task.id, stored)
        with pytest.raises(PoolError, match="store the accepted file"):
            harness.pool.judgement.judge(VALIDATOR, accepted)
    assert harness.status().have == 0 and "accepted" not in harness.kinds()
    harness.pool.judgement.accepted_stored(VALIDATOR, task.id, "8" * 64)
    for _ in range(2):  # repeated, as if the answer had been lost
        harness.pool.judgement.judge(VALIDATOR, accepted)
    assert harness.status().have == 2 and harness.kinds().count("accepted") == 1


@pytest.mark.parametrize("reason", sorted(HARD))
def test_a_hard_rejection_evicts_and_slashes(harness: Harness, reason: Reason) -> None:
    task = harness.rejected(reason)
    assert harness.beat().state == "evicted"
    assert harness.kinds()[-2:] == ["rejected", "slashed"]
    body = json.loads(next(harness.pool.db.ledger.entries(kind="slashed")).body)
    expected = {
        "submission": task.id,
        "worker": ALICE,
        "step": 0,
        "version": 0,
        "groups": 2,
        "nonce": task.nonce,
        "file": "9" * 64,
        "full": True,
        "validator": OTHER_VALIDATOR,  # the validator that confirmed the rejection
        "reason": reason,
    }
    assert body == expected
    assert harness.status().slashed == ["worker-a"]


@pytest.mark.parametrize("reason", sorted(frozenset(Reason) - HARD - {Reason.SPENDING, Reason.INEXACT}))
def test_a_soft_rejection_costs_the_submission_only(harness: Harness, reason: Reason) -> None:
    harness.rejected(reason)
    assert harness.kinds()[-1] == "rejected" and "slashed" not in harness.kinds()
    assert harness.task().number == 1


# --- consequences of an eviction -------------------------------------------------------------------------------------


@pytest.fixture
def wide() -> Harness:
    """Return a pool with batches of 12 groups, so that several submissions may wait."""
    return staffed_pool(prompts_per_step=12)


def slashed(harness: Harness) -> None:
    """Give Alice one accepted submission, one lie and two later uploads, one of them claimed. Then reject the lie."""
    harness.accepted(useful=(True, True))
    lie = harness.upload()
    harness.claims(VALIDATOR, 1)
    held, waiting = harness.upload(), harness.upload()
    harness.claims(OTHER_VALIDATOR, 1)
    assert [harness.state(one.id) for one in (lie, held, waiting)] == ["validating", "validating", "uploaded"]
    harness.pool.judgement.judge(VALIDATOR, verdict(lie.id, Reason.PROOF))
    harness.lease(lie.id, THIRD_VALIDATOR)
    harness.pool.judgement.judge(THIRD_VALIDATOR, verdict(lie.id, Reason.PROOF, (), THIRD_VALIDATOR))


def test_a_slashed_worker_is_paid_nothing_for_its_earlier_uploads(wide: Harness) -> None:
    slashed(wide)
    held = f"{ALICE[:16]}-000002"
    with pytest.raises(PoolError, match="expired and not claimed") as caught:
        wide.judge(held, validator=OTHER_VALIDATOR)
    assert caught.value.status == 409, "the status must make the validator drop its verdict"
    assert wide.claims(VALIDATOR, 8) == []
    assert wide.status().have == 0, "its accepted groups must enter no batch"
    wide.end()
    assert wide.pool.judgement.escrow.tokens_by_credit() == {(ALICE, "forfeited"): 20}
    assert wide.kinds().count("accepted") == wide.kinds().count("slashed") == 1 and "credited" not in wide.kinds()
    assert wide.kinds().index("slashed") < wide.kinds().index("forfeited")


@pytest.mark.parametrize("event", ["suspend", "drain"])
def test_a_worker_that_is_suspended_or_left_is_paid_for_its_uploads(harness: Harness, event: str) -> None:
    task = harness.upload()
    if event == "drain":
        harness.pool.members.drain(ALICE)
        assert harness.beat().state == "left"
    else:
        harness.pool.db.nodes.suspend(ALICE, "a test", harness.clock.now_s)
    harness.claim()
    harness.judge(task.id)
    harness.end()
    assert harness.pool.judgement.escrow.tokens_by_credit() == {(ALICE, "credited"): 20}


def test_a_dismissed_worker_is_paid_nothing_more_and_is_still_slashed_for_a_lie(
    wide: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide.accepted()
    good, lie = wide.upload(), wide.upload()
    wide.claims(VALIDATOR, 2)
    for validator in (VALIDATOR, OTHER_VALIDATOR):
        wide.pool.judgement.trust.evidence.put(ALICE, validator, Process(1, {"better": 50.0}))
    monkeypatch.setattr(wide.pool.judgement.trust, "observe", lambda submission, validator, opinion: "it chooses")
    wide.judge(good.id)
    wide.judge(lie.id, Reason.PROOF)
    assert wide.kinds()[-5:] == ["rejected", "dismissed", "forfeited", "rejected", "slashed"]
    assert wide.state(good.id) == "rejected" and wide.status().have == 0


def test_a_detail_that_quotes_a_workers_file_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.coordinator")
    harness = staffed_pool(workers=(ALICE,), validators=())
    task = harness.upload()
    harness.claim()
    detail = "task\n\x1b[2Jworker-b slashed" + "x" * 999
    quoted = verdict(task.id, Reason.TASKS).model_copy(update={"detail": detail})
    harness.pool.judgement.judge(VALIDATOR, quoted)
    (line,) = [message for record in caplog.records if " rejected: " in (message := record.getMessage())]
    assert line.isprintable() and len(line) < 300


# --- known faults that must not return -------------------------------------------------------------------------------


COORDINATOR = Path(__file__).parents[2] / "src" / "shoal" / "coordinator"


def test_no_silent_peer_can_block_the_coordinator_because_it_connects_to_nobody() -> None:
    clients = {"httpx", "requests", "urllib.request", "socket", "http.client", "web3", "ClientSession"}
    for path in COORDINATOR.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not clients & set(names), path


def test_a_workers_own_figures_earn_nothing(harness: Harness) -> None:
    """Credit is the validator's count: two groups of 10 tokens."""
    boast = Stats(tokens=10**12, busy_s=1e9)
    harness.pool.members.heartbeat(ALICE, Heartbeat(policy_version=0, stats=boast))
    harness.accepted(ALICE)
    harness.pool.members.heartbeat(ALICE, Heartbeat(policy_version=0, stats=boast))
    harness.pool.judgement.escrow.close([])
    shown = {node.name: node for node in harness.status().nodes}["worker-a"]
    assert (shown.credited, harness.status().tokens_generated) == (20, 20)


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.PROOF])
def test_a_rejection_drops_no_valid_work(harness: Harness, reason: Reason) -> None:
    """Others' work counts, and so does this worker's earlier accepted work unless the worker is slashed."""
    before = harness.accepted(BOB, useful=(True, False))
    bad, good = harness.upload(BOB), harness.upload(ALICE)
    harness.claim()
    harness.judge(bad.id, reason)
    assert harness.claimed().assignment.id == good.id
    harness.judge(good.id)
    after = harness.accepted(ALICE)
    batch = harness.pool.batches.of_step(0)
    kept = [good.id, good.id, after.id]
    expected = [*kept, after.id] if reason is Reason.PROOF else [before.id, *kept]
    assert batch.ready and [group.submission for group in batch.groups] == expected


def test_work_that_nobody_checked_is_never_paid_however_old(harness: Harness) -> None:
    task = harness.upload(ALICE)
    harness.clock.now_s += 10 * 365 * 86_400
    harness.beat(ALICE, wants=False)
    harness.pool.judgement.escrow.close([])  # the end of the run
    assert harness.state(task.id) == "uploaded"
    assert harness.pool.judgement.escrow.tokens_by_credit() == {} and "credited" not in harness.kinds()
