"""Exactness classes, and what follows when two validators disagree."""

import json
from pathlib import Path

import pytest

from shoal.coordinator.checkers import DOUBT_S, MISMATCHES, WINDOW_S
from shoal.coordinator.database import PoolError
from shoal.protocol.messages import HARD, LEASE_S, Evaluation, GroupResult, Reason, Replay

from .support import (
    ACCEPTED_FILE,
    ALICE,
    BOB,
    OTHER_VALIDATOR,
    THIRD_VALIDATOR,
    VALIDATOR,
    Harness,
    open_pool,
    staffed_pool,
    verdict,
)

pytestmark = pytest.mark.usefixtures("every_database_slow")

ONE, TWO = "1" * 64, "2" * 64
INEXACT = Replay(tokens=100, mismatched=3)


@pytest.fixture
def harness() -> Harness:
    """Return a pool in which Alice and both validators are in one class, and Bob is in another."""
    return classes(alice=ONE, bob=TWO, first=ONE, second=ONE)


def classes(*, alice: str, bob: str = TWO, first: str, second: str, **validator: str) -> Harness:
    harness = staffed_pool(validator=validator, prompts_per_step=64)
    for key, value in {VALIDATOR: first, OTHER_VALIDATOR: second, ALICE: alice, BOB: bob}.items():
        harness.beat(key, wants=False, fingerprint=value)
    return harness


def uploaded(harness: Harness, key: str = ALICE, fingerprint: str = ONE) -> str:
    """Upload the worker's next submission with this fingerprint. Return its id."""
    answer = harness.beat(key, fingerprint=fingerprint)
    assert answer.assignment is not None, answer.waiting_for
    harness.clock.now_s += 1
    harness.pool.assignments.uploaded(key, answer.assignment.id, "9" * 64)
    return answer.assignment.id


def claimable(harness: Harness, validator: str) -> list[str]:
    return [claim.assignment.id for claim in harness.claims(validator, 8)]


def inexact(harness: Harness, validator: str, id: str) -> None:
    assert claimable(harness, validator) == [id]
    harness.judge(id, Reason.INEXACT, validator=validator, confirmed=False, replay=INEXACT)


def confirmed(harness: Harness) -> int:
    return harness.pool.judgement.checkers.fingerprints.mismatches(ALICE, 0.0, confirmed=True)


# --- routing ---------------------------------------------------------------------------------------------------------


def test_a_submission_goes_to_a_validator_of_its_class() -> None:
    harness = classes(alice=ONE, bob=TWO, first=ONE, second=TWO)
    of_alice, of_bob = uploaded(harness), uploaded(harness, BOB, TWO)
    assert claimable(harness, OTHER_VALIDATOR) == [of_bob]
    assert claimable(harness, VALIDATOR) == [of_alice]


def test_without_a_live_validator_of_its_class_any_validator_checks_a_submission() -> None:
    harness = classes(alice=ONE, first=ONE, second=TWO)
    id = uploaded(harness)
    assert claimable(harness, OTHER_VALIDATOR) == []
    harness.clock.now_s += 31
    harness.beat(OTHER_VALIDATOR, fingerprint=TWO)
    assert claimable(harness, OTHER_VALIDATOR) == [id]


def test_the_first_claim_of_a_submission_fixes_its_workers_fingerprint(harness: Harness) -> None:
    uploaded(harness)
    [claim] = harness.claims(VALIDATOR, 8)
    assert claim.fingerprint == ONE
    harness.beat(ALICE, wants=False, fingerprint=TWO)
    [again] = harness.claims(VALIDATOR, 8)
    assert again.fingerprint == ONE, "a change after the first claim must have no effect"
    harness.judge(claim.assignment.id)
    harness.publish(1)
    answer = harness.beat(ALICE, 1)
    assert answer.assignment is not None
    harness.pool.assignments.uploaded(ALICE, answer.assignment.id, "9" * 64)
    [claim] = harness.claims(VALIDATOR, 8)
    assert claim.fingerprint == "", "the fingerprint of another version must not count"


def test_the_newest_common_version_decides_whether_two_nodes_are_in_one_class(harness: Harness) -> None:
    checkers = harness.pool.checkers
    harness.beat(ALICE, 7, wants=False, fingerprint=TWO)
    assert checkers.fingerprints.of(ALICE) == {0: ONE}, "a fingerprint for an unpublished version was recorded"
    harness.publish(1, 2)
    harness.beat(ALICE, 1, wants=False, fingerprint=TWO)
    harness.beat(VALIDATOR, 2, wants=False, fingerprint=TWO)
    assert checkers.same_class(ALICE, VALIDATOR), "version 0, the only common one, must decide"
    harness.beat(VALIDATOR, 1, wants=False, fingerprint=ONE)
    assert not checkers.same_class(ALICE, VALIDATOR)
    harness.beat(ALICE, 2)
    assert checkers.peers(ALICE) == [], "without a fingerprint Alice must be in no class"


def test_if_classes_is_exact_a_worker_gets_tasks_only_if_a_live_validator_is_in_its_class() -> None:
    harness = classes(alice=ONE, bob=TWO, first=ONE, second=ONE, classes="exact")
    assert harness.beat(ALICE, fingerprint=ONE).assignment is not None
    refused = harness.beat(BOB, fingerprint=TWO)
    assert refused.assignment is None and "validator.classes" in refused.waiting_for
    assert harness.beat(BOB).assignment is None, "Bob must get no task without a fingerprint either"
    harness.clock.now_s += 31
    assert harness.beat(ALICE, fingerprint=ONE).assignment is None, (
        "a task was assigned although the validators are gone"
    )


# --- a second opinion ------------------------------------------------------------------------------------------------


def test_inexact_work_is_rejected_only_after_a_second_validator_of_the_class_confirms_it(harness: Harness) -> None:
    id = uploaded(harness)
    inexact(harness, VALIDATOR, id)
    assert harness.state(id) == "uploaded" and harness.kinds()[-1] != "rejected"
    assert claimable(harness, VALIDATOR) == []
    inexact(harness, OTHER_VALIDATOR, id)
    assert harness.state(id) == "rejected"
    assert "slashed" not in harness.kinds() and harness.beat(fingerprint=ONE).state == "running"
    assert harness.status().exact.mismatched_tokens == 3


@pytest.mark.parametrize("reason, replay", [(Reason.INEXACT, INEXACT), (Reason.PROOF, None)])
def test_the_first_validator_must_renew_its_fingerprint_if_the_second_refutes_it(
    harness: Harness, reason: Reason, replay: Replay | None
) -> None:
    """The first validator's rejection does not count, and nobody is slashed."""
    id = uploaded(harness)
    assert claimable(harness, VALIDATOR) == [id]
    harness.judge(id, reason, confirmed=False, replay=replay)
    assert claimable(harness, OTHER_VALIDATOR) == [id]
    harness.judge(id, validator=OTHER_VALIDATOR, replay=Replay(tokens=100, mismatched=0))
    assert harness.state(id) == "accepted" and "slashed" not in harness.kinds()
    assert harness.beat(VALIDATOR, fingerprint=ONE, renews=False).renewals == 1, "the validator must renew"
    assert harness.beat(ALICE, fingerprint=ONE, renews=False).renewals == 0
    assert any("validator-e" in notice for notice in harness.status().notices)
    assert confirmed(harness) == 0
    exact = harness.status().exact
    assert (exact.submissions, exact.tokens, exact.mismatched_tokens) == (1, 100, 0)


def test_a_repeated_first_verdict_changes_nothing(harness: Harness) -> None:
    id = uploaded(harness)
    inexact(harness, VALIDATOR, id)
    harness.judge(id, Reason.INEXACT, confirmed=False, replay=INEXACT)
    assert harness.state(id) == "uploaded"
    assert claimable(harness, OTHER_VALIDATOR) == [id]
    harness.judge(id, Reason.INEXACT, confirmed=False, replay=INEXACT)
    assert harness.state(id) == "validating"


def test_without_a_second_validator_of_the_class_inexact_work_is_unpaid_but_the_worker_is_not_suspended() -> None:
    harness = classes(alice=ONE, first=ONE, second=TWO)
    for _ in range(MISMATCHES):
        id = uploaded(harness)
        inexact(harness, VALIDATOR, id)
        assert harness.state(id) == "rejected"
    assert confirmed(harness) == 0
    assert harness.beat(fingerprint=ONE).assignment is not None, "the worker must not be suspended"


def test_if_the_second_validator_dies_the_first_one_judges_alone(harness: Harness) -> None:
    id = uploaded(harness)
    inexact(harness, VALIDATOR, id)
    harness.clock.now_s += 31
    harness.beat(VALIDATOR, fingerprint=ONE)
    assert claimable(harness, VALIDATOR) == [], "nobody judges a submission twice"
    assert harness.state(id) == "uploaded", "a validator that was live a moment ago may come back"
    harness.clock.now_s += DOUBT_S
    harness.beat(VALIDATOR, fingerprint=ONE)
    assert claimable(harness, VALIDATOR) == []
    assert harness.state(id) == "rejected" and confirmed(harness) == 0


def test_a_rejection_waits_for_a_validator_that_is_away_for_a_moment(harness: Harness) -> None:
    """Otherwise a faulty validator's rejection counts alone whenever the other one restarts."""
    id = uploaded(harness)
    harness.clock.now_s += 31
    harness.beat(VALIDATOR, fingerprint=ONE)
    assert claimable(harness, VALIDATOR) == [id]
    harness.judge(id, Reason.PROOF, confirmed=False)
    assert harness.state(id) == "uploaded"
    harness.beat(OTHER_VALIDATOR, fingerprint=ONE)
    assert claimable(harness, OTHER_VALIDATOR) == [id]
    harness.judge(id, validator=OTHER_VALIDATOR, replay=Replay(tokens=100, mismatched=0))
    assert harness.state(id) == "accepted"


def test_a_second_validator_that_cannot_replay_exactly_does_not_refute_the_first(harness: Harness) -> None:
    id = uploaded(harness)
    inexact(harness, VALIDATOR, id)
    assert claimable(harness, OTHER_VALIDATOR) == [id]
    harness.judge(id, validator=OTHER_VALIDATOR, replay=None)
    assert harness.state(id) == "rejected"
    assert harness.beat(OTHER_VALIDATOR, fingerprint=ONE, renews=False).renewals == 1
    assert confirmed(harness) == 0, "a mismatch that one validator found must stay unconfirmed"


def test_a_lie_is_slashed_once_any_second_validator_confirms_it() -> None:
    harness = classes(alice=ONE, first=ONE, second=TWO)
    id = uploaded(harness)
    assert claimable(harness, VALIDATOR) == [id]
    harness.judge(id, Reason.PROOF, confirmed=False)
    assert harness.beat(fingerprint=ONE).state == "running"
    assert claimable(harness, OTHER_VALIDATOR) == [id]
    harness.judge(id, Reason.SAMPLING, validator=OTHER_VALIDATOR)
    assert harness.kinds()[-2:] == ["rejected", "slashed"]


def test_the_second_validator_checks_all_of_a_submission_even_if_the_first_made_a_spot_check() -> None:
    """Otherwise the second validator could draw rollouts without a lie, and the first validator would be blamed."""
    harness = classes(alice=ONE, first=ONE, second=TWO)
    id = uploaded(harness)
    assert claimable(harness, VALIDATOR) == [id]
    harness.lease(id, VALIDATOR, full_check=False)
    harness.judge(id, Reason.PROOF, confirmed=False)
    harness.beat(fingerprint=ONE)
    [claim] = harness.claims(OTHER_VALIDATOR, 8)
    assert claim.assignment.id == id and claim.full


# --- a first verdict without a second one ----------------------------------------------------------------------------


def doubted(harness: Harness, reason: Reason | None = Reason.PROOF) -> str:
    """Let Alice upload a submission, and the first validator judge it. The second has not checked it. Return its id."""
    id = uploaded(harness)
    assert claimable(harness, VALIDATOR) == [id]
    harness.judge(id, reason, confirmed=False)
    assert harness.state(id) == "uploaded" and "slashed" not in harness.kinds()
    return id


def costs_only_the_submission(harness: Harness, id: str, reason: Reason = Reason.PROOF) -> None:
    assert harness.state(id) == "rejected" and not {"slashed", "forfeited"} & set(harness.kinds())
    [entry] = harness.pool.db.ledger.entries(kind="rejected")
    body = json.loads(entry.body)
    assert (body["submission"], body["reason"], body["validator"]) == (id, reason.value, VALIDATOR)
    assert len(body["opinions"]) == 1
    assert harness.node().state == "active" and harness.beat(fingerprint=ONE).state != "evicted"


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.SPENDING}))
@pytest.mark.parametrize("why", ["is late", "dies", "holds its lease too long", "is alone"])
def test_one_validators_rejections_cost_only_the_submissions(reason: Reason, why: str) -> None:
    """However many there are, and whether or not the second validator could have been asked."""
    harness = classes(alice=ONE, first=ONE, second=ONE)
    for _ in range(MISMATCHES if reason is Reason.INEXACT else MISMATCHES + 2):
        if why == "is alone":
            harness.clock.now_s += DOUBT_S + 31
            harness.beat(VALIDATOR, wants=False, fingerprint=ONE)
        else:
            harness.beat(OTHER_VALIDATOR, wants=False, fingerprint=ONE)
        id = uploaded(harness)
        assert claimable(harness, VALIDATOR) == [id]
        harness.judge(id, reason, confirmed=False)
        if why == "dies":
            harness.clock.now_s += DOUBT_S + 31
            harness.beat(VALIDATOR, wants=False, fingerprint=ONE)
        elif why != "is alone":
            if why == "holds its lease too long":
                assert claimable(harness, OTHER_VALIDATOR) == [id]
            for _ in range(61):
                harness.clock.now_s += 10
                for key in (VALIDATOR, OTHER_VALIDATOR):
                    harness.beat(key, wants=False, fingerprint=ONE)
        harness.pool.judgement.close_waiting()
        assert harness.state(id) == "rejected"
        assert harness.node().state == "active" and not {"slashed", "forfeited"} & set(harness.kinds())
        harness.beat(ALICE, wants=False, fingerprint=ONE)
    assert harness.node().suspensions == 0
    if reason in HARD:
        assert any("no second validator confirmed it" in notice for notice in harness.status().notices)


@pytest.mark.parametrize("second", ["claims too late", "claims it and dies", "never claims"])
def test_a_doubted_version_is_kept_until_the_doubt_is_settled_or_overdue(harness: Harness, second: str) -> None:
    id = doubted(harness)
    if second == "claims it and dies":
        assert claimable(harness, OTHER_VALIDATOR) == [id]
        harness.clock.now_s += 301
        for key in (VALIDATOR, OTHER_VALIDATOR):
            harness.beat(key, wants=False, fingerprint=ONE)
    harness.publish(1, 2, 3, 4)
    harness.join("9" * 64, "relay")
    assert harness.beat("9" * 64, wants=False).keep == [0], "it must be kept before the next publication drops it"
    harness.publish(5, 6)
    assert harness.beat("9" * 64, wants=False).keep == [0]
    assert claimable(harness, VALIDATOR) == []
    assert harness.state(id) in ("uploaded", "validating")
    if second == "claims too late":
        assert claimable(harness, OTHER_VALIDATOR) == [id]
        harness.judge(id, Reason.PROOF, validator=OTHER_VALIDATOR)
        assert harness.kinds()[-2:] == ["rejected", "slashed"]
    else:
        harness.clock.now_s += DOUBT_S + 1
        assert claimable(harness, VALIDATOR) == []
        costs_only_the_submission(harness, id)
    assert harness.beat("9" * 64, wants=False).keep == []


def test_a_version_that_a_validator_checks_is_kept(harness: Harness) -> None:
    """Otherwise a validator could reject it once nobody else can check it."""
    id = uploaded(harness)
    assert claimable(harness, VALIDATOR) == [id]
    harness.publish(1, 2, 3, 4, 5, 6)
    harness.join("9" * 64, "relay")
    assert harness.beat("9" * 64, wants=False).keep == [0] and harness.beat(wants=False).keep == []
    harness.judge(id, Reason.PROOF, confirmed=False)
    assert claimable(harness, OTHER_VALIDATOR) == [id]


def test_a_version_is_kept_for_another_validator_after_a_claim_has_lapsed(harness: Harness) -> None:
    """Otherwise a validator could let honest work expire by holding it until relays have dropped its version."""
    id = uploaded(harness)
    assert claimable(harness, VALIDATOR) == [id]
    harness.publish(1, 2, 3, 4, 5, 6)
    harness.clock.now_s += LEASE_S + 1
    for key in (VALIDATOR, OTHER_VALIDATOR):
        harness.beat(key, wants=False, fingerprint=ONE)
    assert claimable(harness, VALIDATOR) == [] and claimable(harness, OTHER_VALIDATOR) == [id]


def test_a_verdict_under_a_lease_counts_although_the_wait_is_over(harness: Harness) -> None:
    id = doubted(harness)
    harness.clock.now_s += DOUBT_S - 1
    harness.beat(OTHER_VALIDATOR, wants=False, fingerprint=ONE)
    harness.beat(VALIDATOR, wants=False, fingerprint=ONE)
    assert claimable(harness, OTHER_VALIDATOR) == [id]
    harness.clock.now_s += 100
    assert claimable(harness, VALIDATOR) == []
    harness.judge(id, validator=OTHER_VALIDATOR)
    assert harness.state(id) == "accepted" and "slashed" not in harness.kinds()


@pytest.mark.parametrize("confirmed", [True, False])
def test_at_the_runs_end_validators_settle_their_doubts_before_the_worker_is_paid(
    harness: Harness, confirmed: bool
) -> None:
    harness.judge(claimed_of(harness, uploaded(harness)))
    id = doubted(harness)
    harness.end()
    harness.publish(6)
    harness.pool.learning.evaluated(Evaluation(version=6, greedy=0.5, sampled=None, n=1, final=True))
    assert harness.status().state == "running" and "credited" not in harness.kinds()
    assert harness.beat(OTHER_VALIDATOR, wants=False, fingerprint=ONE).state == "running"
    assert harness.beat(BOB, wants=False).state == "finished"
    if confirmed:
        assert claimable(harness, OTHER_VALIDATOR) == [id]
        harness.judge(id, Reason.PROOF, validator=OTHER_VALIDATOR)
        assert harness.pool.judgement.escrow.tokens_by_credit() == {(ALICE, "forfeited"): 20}
    else:
        harness.clock.now_s += DOUBT_S + 1
        harness.pool.judgement.close_waiting()  # which the coordinator does all the time
        costs_only_the_submission(harness, id)
        assert harness.pool.judgement.escrow.tokens_by_credit() == {(ALICE, "credited"): 20}
    assert harness.status().state == "finished"
    assert harness.beat(OTHER_VALIDATOR, wants=False).state == "finished"


def claimed_of(harness: Harness, id: str) -> str:
    assert claimable(harness, VALIDATOR) == [id]
    return id


def test_after_the_runs_end_a_rejection_needs_confirmation_too(harness: Harness) -> None:
    id = claimed_of(harness, uploaded(harness))
    harness.end()
    harness.judge(id, Reason.PROOF, confirmed=False)
    assert harness.state(id) == "uploaded"
    harness.clock.now_s += DOUBT_S + 31
    harness.pool.judgement.close_waiting()
    costs_only_the_submission(harness, id)


def test_a_first_verdict_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    harness = open_pool(tmp_path / "state.db", prompts_per_step=64)
    harness.join(ALICE)
    for key in (VALIDATOR, OTHER_VALIDATOR):
        harness.join(key, "validator")
    harness.publish(0)
    id = doubted(harness)
    again = open_pool(tmp_path / "state.db", clock=harness.clock, prompts_per_step=64)
    assert claimable(again, OTHER_VALIDATOR) == [id]
    again.judge(id, Reason.PROOF, validator=OTHER_VALIDATOR)
    assert again.kinds()[-2:] == ["rejected", "slashed"]


def test_two_doubted_lies_slash_the_worker_once(harness: Harness) -> None:
    first, second = uploaded(harness), uploaded(harness)
    assert claimable(harness, VALIDATOR) == [first, second]
    for id in (first, second):
        harness.judge(id, Reason.PROOF, confirmed=False)
    assert claimable(harness, OTHER_VALIDATOR) == [first, second]
    harness.judge(first, Reason.PROOF, validator=OTHER_VALIDATOR)
    assert harness.state(second) == "expired" and harness.kinds().count("slashed") == 1


# --- two that disagree, and draws ------------------------------------------------------------------------------------

Y, N = None, Reason.PROOF


def opinions(harness: Harness, reasons: tuple[Reason | None, ...]) -> str:
    """Let the validators judge one submission of Alice in turn. Return its state."""
    id = uploaded(harness)
    for validator, reason in zip((VALIDATOR, OTHER_VALIDATOR, THIRD_VALIDATOR), reasons, strict=False):
        assert claimable(harness, validator) == [id]
        harness.judge(id, reason, validator=validator, confirmed=False)
    return harness.state(id)


@pytest.mark.parametrize(
    ("reasons", "state", "slashed"),
    [
        ((Y,), "accepted", False),
        ((N,), "uploaded", False),
        ((N, N), "rejected", True),
        ((N, Y), "uploaded", False),
        ((N, Y, Y), "accepted", False),
        ((N, Y, N), "rejected", True),
        ((N, Reason.CONTEXT), "rejected", False),
        ((Reason.CONTEXT, Y, Y), "accepted", False),
        ((Reason.UNREPEATABLE, Y, Y), "accepted", False),
        ((Reason.UNREPEATABLE, Reason.UNREPEATABLE), "rejected", False),
    ],
)
def test_a_third_validator_decides_between_two(
    harness: Harness, reasons: tuple[Reason | None, ...], state: str, slashed: bool
) -> None:
    harness.join(THIRD_VALIDATOR, "validator")
    assert opinions(harness, reasons) == state
    assert ("slashed" in harness.kinds()) == slashed
    if state == "accepted" and len(reasons) > 1:
        assert harness.beat(VALIDATOR, fingerprint=ONE, renews=False).renewals == 1, "the outvoted one must renew"


@pytest.mark.parametrize(
    ("reasons", "state", "slashed"),
    [((Y, Y), "accepted", False), ((Y, N, N), "rejected", True), ((Y, N, Y), "accepted", False)],
)
def test_a_drawn_share_of_accepted_work_is_judged_again(
    harness: Harness, reasons: tuple[Reason | None, ...], state: str, slashed: bool
) -> None:
    """So a validator that accepts a friend's lies is found, and the friend is slashed."""
    harness.join(THIRD_VALIDATOR, "validator")
    harness.pool.checkers.random = lambda: 0.0
    assert opinions(harness, reasons) == state
    assert ("slashed" in harness.kinds()) == slashed
    [entry] = harness.pool.db.ledger.entries(kind=state)
    assert len(json.loads(entry.body)["opinions"]) == len(reasons)


def test_of_two_acceptances_the_one_that_credits_less_counts(harness: Harness) -> None:
    harness.pool.checkers.random = lambda: 0.0
    for number, tokens in enumerate([(10, 900), (900, 10)]):
        id = uploaded(harness)
        for validator, count in zip((VALIDATOR, OTHER_VALIDATOR), tokens, strict=True):
            assert claimable(harness, validator) == [id]
            harness.pool.judgement.accepted_stored(validator, id, ACCEPTED_FILE)
            groups = [GroupResult(reward_mean=0.5, useful=True, tokens=count)] * 2
            harness.pool.judgement.judge(validator, verdict(id, None, (), validator, groups=groups))
        entry = list(harness.pool.db.ledger.entries(kind="accepted"))[-1]
        assert json.loads(entry.body)["tokens"] == 20
        assert any("counted 1800 tokens" in notice for notice in harness.status().notices), number


def test_if_two_disagree_and_nobody_else_is_live_the_worker_is_paid(harness: Harness) -> None:
    harness.pool.checkers.random = lambda: 0.0
    assert opinions(harness, (Y, N)) == "accepted"
    submission = harness.pool.db.submissions.get(f"{ALICE[:16]}-000000")
    assert submission is not None and submission.accepted_hash == ACCEPTED_FILE and submission.validator == VALIDATOR
    assert "slashed" not in harness.kinds()
    assert any("but validator-e did not" in notice for notice in harness.status().notices), (
        "the operator must hear of it"
    )


def test_a_worker_cannot_choose_the_second_validator_by_its_fingerprint() -> None:
    harness = classes(alice=ONE, first=ONE, second=TWO)
    id = uploaded(harness)
    assert claimable(harness, OTHER_VALIDATOR) == [], "only its class gives the first opinion"
    assert claimable(harness, VALIDATOR) == [id]
    harness.pool.checkers.random = lambda: 0.0
    harness.judge(id, validator=VALIDATOR, confirmed=False)
    assert claimable(harness, OTHER_VALIDATOR) == [id]


@pytest.mark.parametrize(
    "changed",
    [{"run": "other"}, {"submission": f"{ALICE[:16]}-000009"}, {"file": "7" * 64}, {"signer": OTHER_VALIDATOR}],
)
def test_an_opinion_counts_only_for_the_file_that_its_validator_signed_it_for(
    harness: Harness, changed: dict[str, str]
) -> None:
    id = claimed_of(harness, uploaded(harness))
    signer = changed.pop("signer", VALIDATOR)
    given = verdict(changed.pop("submission", id), Reason.PROOF, (), signer, **changed)
    with pytest.raises(PoolError) as refused:
        harness.pool.judgement.judge(VALIDATOR, given.model_copy(update={"submission": id}))
    assert refused.value.status == 400 and harness.state(id) == "validating"


@pytest.mark.parametrize("reason", [Reason.SPENDING, Reason.INEXACT])
def test_a_rejection_that_no_other_validator_could_confirm_is_refused(reason: Reason) -> None:
    """One submission shows no spending. Work of a worker that claims no class has no class that could replay it."""
    harness = staffed_pool()
    id = harness.upload().id
    assert claimable(harness, VALIDATOR) == [id]
    with pytest.raises(PoolError) as refused:
        harness.judge(id, reason, confirmed=False)
    assert refused.value.status == 400 and harness.state(id) == "validating"


# --- renewals and suspension -----------------------------------------------------------------------------------------


def mismatch(harness: Harness) -> None:
    id = uploaded(harness)
    inexact(harness, VALIDATOR, id)
    inexact(harness, OTHER_VALIDATOR, id)


def test_after_a_mismatch_a_worker_gets_no_task_until_it_has_renewed_its_fingerprint(harness: Harness) -> None:
    mismatch(harness)
    waiting = harness.beat(fingerprint=ONE, renews=False)
    assert waiting.renewals == 1 and waiting.assignment is None and "fingerprint" in waiting.waiting_for
    assert harness.beat(fingerprint=ONE).assignment is not None


def test_another_fingerprint_puts_a_worker_into_another_class_and_its_work_is_accepted(harness: Harness) -> None:
    """The worker's library was updated, or it moved to other cores."""
    for _ in range(MISMATCHES - 1):
        mismatch(harness)
    harness.beat(fingerprint=TWO)
    assert harness.pool.members.checkers.peers(ALICE) == []
    uploaded(harness, fingerprint=TWO)
    [claim] = harness.claims(VALIDATOR, 8)
    assert claim.fingerprint == TWO


@pytest.mark.parametrize("between", [ONE, TWO], ids=["the same fingerprint", "another one in between"])
def test_repeated_mismatches_suspend_the_worker(harness: Harness, between: str) -> None:
    for _ in range(MISMATCHES):
        harness.beat(wants=False, fingerprint=between)
        assert harness.beat(fingerprint=ONE).assignment is not None
        mismatch(harness)
    refused = harness.beat(fingerprint=ONE)
    assert refused.assignment is None and "inexact" in refused.waiting_for and refused.state == "running"
    assert "slashed" not in harness.kinds()


def test_mismatches_long_ago_do_not_suspend_the_worker(harness: Harness) -> None:
    for _ in range(MISMATCHES + 1):
        mismatch(harness)
        for _ in range(200):  # steps of 20 s, the interval of heartbeats
            harness.clock.now_s += 20
            for key in (VALIDATOR, OTHER_VALIDATOR):
                harness.beat(key, wants=False, fingerprint=ONE)
        assert harness.beat(wants=False, fingerprint=ONE).waiting_for == ""
    assert harness.beat(fingerprint=ONE).assignment is not None


@pytest.mark.parametrize("classes", ["any", "exact"])
def test_unconfirmed_mismatches_exclude_a_worker_from_all_classes_for_a_while(classes: str) -> None:
    """The only validator then checks the worker's submissions with tolerances, in one prefill instead of two."""
    settings = {"validator": {"classes": classes}, "prompts_per_step": 64}
    harness = staffed_pool(workers=(ALICE,), validators=(VALIDATOR,), **settings)
    harness.beat(VALIDATOR, wants=False, fingerprint=ONE)
    for _ in range(MISMATCHES):
        inexact(harness, VALIDATOR, uploaded(harness))
    answer = harness.beat(fingerprint=ONE)
    if classes == "exact":
        assert answer.assignment is None and "differed too often" in answer.waiting_for
    else:
        assert answer.assignment is not None
        harness.pool.assignments.uploaded(ALICE, answer.assignment.id, "9" * 64)
        [claim] = harness.claims(VALIDATOR, 8)
        assert claim.fingerprint == ""
    harness.clock.now_s += WINDOW_S
    harness.beat(VALIDATOR, wants=False, fingerprint=ONE)
    harness.beat(wants=False, fingerprint=ONE)
    assert harness.pool.members.checkers.peers(ALICE) == [VALIDATOR]


def test_mismatches_uploaded_before_a_renewal_count_once(harness: Harness) -> None:
    """One flipped bit makes several submissions inexact before the first verdict."""
    ids = [uploaded(harness) for _ in range(MISMATCHES + 1)]
    for validator in (VALIDATOR, OTHER_VALIDATOR):
        assert claimable(harness, validator) == ids
        for id in ids:
            harness.judge(id, Reason.INEXACT, validator=validator, confirmed=False, replay=INEXACT)
    assert all(harness.state(id) == "rejected" for id in ids)
    assert confirmed(harness) == 1
    assert harness.beat(fingerprint=ONE).assignment is not None


def test_the_operator_is_told_what_a_single_validator_can_do() -> None:
    harness = staffed_pool(validators=(VALIDATOR,))
    assert any(notice.startswith("one validator:") for notice in harness.status().notices)
    harness = staffed_pool(validators=())
    assert harness.status().notices == []
