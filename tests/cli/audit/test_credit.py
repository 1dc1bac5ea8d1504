"""Credit is paid once enough of the worker's later tasks were checked, in whatever order their verdicts came."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.audit.pay import Accepted
from shoal.cli.audit.work import Walk
from shoal.config import Config, sections

from ...coordinator.support import ALICE, VALIDATOR, open_pool

CHECKS = 2


@pytest.fixture(autouse=True)
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MIN_ESCROW_CHECKS", CHECKS)


ONE = Accepted(
    id="",
    number=0,
    worker=ALICE,
    validator=VALIDATOR,
    step=0,
    version=0,
    nonce="",
    full=True,
    tokens=10,
    useful=[True],
    group_tokens=[10],
    file="",
    accepted="",
    content="",
)


def name(number: int) -> str:
    return f"{ALICE[:16]}-{number:06d}"


def walk(*accepted: int, full: bool = True) -> Walk:
    """Tasks of one worker, in the order in which they were accepted."""
    run: Any = SimpleNamespace(config=Config())
    found = Walk(run)
    for number in accepted:
        one = replace(ONE, id=name(number), number=number, full=full)
        accept(found, one)
    return found


def accept(found: Walk, one: Accepted) -> None:
    found.found.accepted[one.id] = one
    found.pay.accepted(one)


def paid(found: Walk, *numbers: int) -> None:
    found.pay.credited(
        {"worker": ALICE, "submissions": [name(number) for number in numbers], "tokens": 10 * len(numbers)}
    )


def test_what_two_later_checks_cover_is_paid() -> None:
    paid(walk(0, 1, 2, 3), 0, 1)
    paid(walk(0, 2, 1, 3), 0, 1)  # the verdict on 1 came after that on 2
    paid(walk(3, 2, 1, 0), 0, 1)


@pytest.mark.parametrize("accepted", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_what_they_do_not_cover_is_not(accepted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="before later checks cover it"):
        paid(walk(*accepted), 0, 1, 2)


def test_what_was_not_checked_whole_covers_nothing() -> None:
    with pytest.raises(ValueError, match="before later checks cover it"):
        paid(walk(0, 1, 2, 3, full=False), 0)


def test_the_coordinator_pays_what_the_audit_allows() -> None:
    """Uploads wait for their verdicts, and two validators give them in another order."""
    harness = open_pool(prompts_per_step=64)
    harness.join(ALICE)
    harness.join(VALIDATOR, "validator")
    harness.publish(0)
    tasks = [harness.upload(ALICE) for _ in range(4)]
    for number in (0, 2, 1, 3):
        harness.lease(tasks[number].id, VALIDATOR)
        harness.judge(tasks[number].id, None, (False, False))
    run: Any = SimpleNamespace(config=harness.pool.config)
    found, credited = Walk(run), []
    for entry in harness.pool.db.ledger.entries():
        body = json.loads(entry.body)
        if entry.kind == "accepted":
            number, tokens = int(body["submission"][-6:]), body["tokens"]
            accept(found, replace(ONE, id=body["submission"], number=number, tokens=tokens))
        elif entry.kind == "credited":
            found.pay.credited(body)
            credited += body["submissions"]
    assert credited == [task.id for task in tasks[:2]]
