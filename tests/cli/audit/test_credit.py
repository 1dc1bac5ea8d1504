"""The audit allows credit once enough of a worker's later tasks were checked, whatever the order of the verdicts."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.audit.pay import Accepted
from shoal.cli.audit.run import Checks
from shoal.cli.audit.walk import Walk
from shoal.config import Config, sections
from shoal.protocol.messages import Opinion

from ...coordinator.support import ALICE, VALIDATOR, open_pool

CHECKS = 2


@pytest.fixture(autouse=True)
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MIN_ESCROW_CHECKS", CHECKS)


SUBMISSION = Accepted(
    id="", number=0, worker=ALICE, validator=VALIDATOR, step=0, version=0, nonce="", full=True, tokens=10, useful=[True],
    group_tokens=[10], file="", accepted="", config=Config(),
)  # fmt: skip


OPINION = Opinion(run="r", submission=f"{ALICE[:16]}-000000", file="0" * 64, reason=None)


def name(number: int) -> str:
    return f"{ALICE[:16]}-{number:06d}"


def walk(*accepted: int, full: bool = True) -> Walk:
    """Return a `Walk` after the acceptance of these tasks of one worker, in this order."""
    run: Any = SimpleNamespace(config=Config(), checks=Checks())
    walk = Walk(run)
    for number in accepted:
        accept(walk, replace(SUBMISSION, id=name(number), number=number, full=full))
    return walk


def accept(walk: Walk, submission: Accepted) -> None:
    walk.state.accepted[submission.id] = submission
    walk.pay.accepted(submission, OPINION)


def pay(walk: Walk, *numbers: int) -> None:
    submissions = [name(number) for number in numbers]
    walk.pay.credited({"worker": ALICE, "submissions": submissions, "tokens": 10 * len(numbers)})


@pytest.mark.parametrize("accepted", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (2, 0, 3, 1)])
def test_only_work_before_two_checked_tasks_may_be_paid(accepted: tuple[int, ...]) -> None:
    pay(walk(*accepted), 0, 1)
    with pytest.raises(ValueError, match="before later checks cover it"):
        pay(walk(*accepted), 0, 1, 2)


def test_a_task_that_was_checked_only_partly_covers_nothing() -> None:
    with pytest.raises(ValueError, match="before later checks cover it"):
        pay(walk(0, 1, 2, 3, full=False), 0)


def test_the_coordinator_pays_what_the_audit_allows() -> None:
    """Verdicts arrive in a different order from uploads."""
    harness = open_pool(prompts_per_step=64)
    harness.join(ALICE)
    harness.join(VALIDATOR, "validator")
    harness.publish(0)
    tasks = [harness.upload(ALICE) for _ in range(4)]
    for number in (0, 2, 1, 3):
        harness.lease(tasks[number].id, VALIDATOR)
        harness.judge(tasks[number].id, None, (False, False))
    run: Any = SimpleNamespace(config=harness.pool.config, checks=Checks())
    walk, credited = Walk(run), []
    for entry in harness.pool.db.ledger.entries():
        body = json.loads(entry.body)
        if entry.kind == "accepted":
            number, tokens = int(body["submission"][-6:]), body["tokens"]
            accept(walk, replace(SUBMISSION, id=body["submission"], number=number, tokens=tokens))
        elif entry.kind == "credited":
            walk.pay.credited(body)
            credited += body["submissions"]
    assert credited == [task.id for task in tasks[:2]]
