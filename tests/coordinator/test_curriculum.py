"""Curriculum pages: closed when a step opens, named by assignments, and recomputed from the ledger."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import parse
from shoal.coordinator.curriculum import open_pages, recomputed
from shoal.coordinator.database import PoolError
from shoal.coordinator.pool import Pool
from shoal.coordinator.state.folder import FolderError
from shoal.ledger.connection import Connection, open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.messages import MILLION, GroupResult, Outcomes, Verdict

from .support import ALICE, BOB, COORDINATOR, VALIDATOR, Clock, Harness


def open_harness(database: Connection, curriculum: str = "pass_rate") -> Harness:
    """A step needs two groups, a submission holds two."""
    config = parse(
        {
            "run": {"steps": 6},
            "tasks": {"curriculum": curriculum},
            "coordinator": {"prompts_per_step": 2},
            "workers": {"groups_per_submission": 2},
            "learner": {"optimizer_steps_per_step": 1},
        }
    )
    clock = Clock()
    return Harness(
        Pool(database, Ledger(database, COORDINATOR, clock=clock), config, "r", clock, secret=b"secret"),
        clock,
    )


def populated(harness: Harness) -> Harness:
    """Two workers and a validator."""
    for key in (ALICE, BOB):
        harness.join(key)
    harness.join(VALIDATOR, "validator")
    harness.publish(0)
    return harness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return populated(open_harness(open_sqlite(tmp_path / "pool.sqlite")))


def group(task: int, right: int, *, errors: int = 0) -> GroupResult:
    """A group of four completions."""
    outcomes = Outcomes(graded=4 - errors, grader_error=errors)
    return GroupResult(
        task=task,
        reward_mean=right / 4,
        score_millionths=right * MILLION,
        outcomes=outcomes,
        useful=0 < right < 4,
        tokens=8,
    )


def accept(harness: Harness, *groups: GroupResult, key: str = ALICE) -> str:
    """A submission of these groups, accepted. Returns the digest of the page its tasks were drawn by."""
    task = harness.upload(key)
    claim = harness.claim()
    assert claim is not None and claim.assignment == task, "worker and validator are told the same page"
    judge(harness, task.id, *groups)
    return task.curriculum


def judge(harness: Harness, id: str, *groups: GroupResult) -> None:
    harness.contents += 1
    harness.pool.judgement.accepted_stored(VALIDATOR, id, "8" * 64)
    harness.pool.judgement.judge(
        VALIDATOR,
        Verdict(
            submission=id,
            reason=None,
            detail="",
            evidence={},
            content=f"{harness.contents:064x}",
            accepted_hash="8" * 64,
            groups=list(groups),
        ),
    )


def entries(harness: Harness) -> Any:
    return harness.pool.db.ledger.entries()


def test_a_step_is_drawn_by_what_was_accepted_before_it_opened(harness: Harness) -> None:
    assert accept(harness, group(3, 0), group(5, 1)) == "", "nothing is known yet"
    assert accept(harness, group(3, 2), group(5, 4)) == "", "the step is still open"
    first = harness.task().curriculum
    page = harness.pool.curriculum.pages.page(first)
    assert page.digest() == first and (page.step, page.previous) == (1, "")
    assert page.tasks == [(3, 8, 2 * MILLION), (5, 8, 5 * MILLION)]


def test_pages_are_a_chain_and_each_group_is_in_one(harness: Harness) -> None:
    accept(harness, group(3, 1), group(5, 1))
    first = accept(harness, group(9, 2), group(3, 3))
    second = harness.task().curriculum
    page = harness.pool.curriculum.pages.page(second)
    assert (page.step, page.previous) == (2, first)
    assert page.tasks == [(3, 4, 3 * MILLION), (9, 4, 2 * MILLION)]


def test_an_assignment_keeps_its_page_when_a_step_opens_meanwhile(harness: Harness) -> None:
    late = harness.task(BOB)
    harness.clock.now_s += 31  # Bob is silent, so others get work
    accept(harness, group(3, 1), group(5, 1))
    assert harness.task(BOB) == late and late.curriculum == "", "asking again gives no better page"
    harness.pool.assignments.uploaded(BOB, late.id, "9" * 64)
    claim = harness.claim()
    assert claim is not None and claim.assignment == late
    assert harness.pool.curriculum.digest(1) != "", "a new one would be drawn by a page"


def test_a_group_with_a_grader_error_says_nothing_of_its_task(harness: Harness) -> None:
    accept(harness, group(3, 1, errors=2), group(5, 1))
    accept(harness, group(5, 1), group(7, 0))
    page = harness.pool.curriculum.pages.page(harness.task().curriculum)
    assert page.tasks == [(5, 8, 2 * MILLION), (7, 4, 0)]
    assert [one.tasks for one, _ in recomputed(entries(harness))] == [page.tasks]


def test_whoever_has_the_ledger_recomputes_every_page(harness: Harness) -> None:
    for right in (1, 2, 3):
        accept(harness, group(3, right), group(5, right))
    found = list(recomputed(entries(harness)))
    assert [page.step for page, _ in found] == [1, 2, 3]
    assert all(page.digest() == recorded for page, recorded in found)
    assert found[-1][0] == harness.pool.curriculum.pages.page(found[-1][1])


def test_a_coordinator_that_made_up_a_page_is_found_out(harness: Harness) -> None:
    accept(harness, group(3, 1), group(5, 1))
    changed = [
        entry.model_copy(update={"body": entry.body.replace(f"[3,4,{MILLION}]", f"[3,4,{2 * MILLION}]")})
        for entry in entries(harness)
    ]
    [(page, recorded)] = recomputed(changed)
    assert page.digest() != recorded


def test_without_a_curriculum_there_are_no_pages(tmp_path: Path) -> None:
    harness = populated(open_harness(open_sqlite(tmp_path / "uniform.sqlite"), "uniform"))
    accept(harness, group(3, 1), group(5, 1))
    assert harness.task().curriculum == "" and "curriculum" not in harness.kinds()
    accepted = [json.loads(entry.body) for entry in entries(harness) if entry.kind == "accepted"]
    assert "scores" not in accepted[0]


def test_pages_survive_a_restart_and_can_be_read_from_the_folder(harness: Harness, tmp_path: Path) -> None:
    accept(harness, group(3, 1), group(5, 1))
    named = harness.task().curriculum
    again = open_harness(open_sqlite(tmp_path / "pool.sqlite"))
    assert again.task().curriculum == named
    pages = open_pages(tmp_path)
    assert pages.digest(0) == "" and pages.digest(1) == pages.digest(4) == named
    assert pages.page(named) == harness.pool.curriculum.pages.page(named)


def test_a_page_that_does_not_exist_and_a_folder_without_pages_are_named(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=f"no curriculum page {'a' * 64}") as refused:
        harness.pool.curriculum.pages.page("a" * 64)
    assert refused.value.status == 404
    with pytest.raises(FolderError, match="is not the folder of a coordinator that has run; name that folder"):
        open_pages(tmp_path / "elsewhere")


def test_pages_in_postgresql_are_found_by_the_config_beside_the_folder(postgres: str, tmp_path: Path) -> None:
    from shoal.ledger.postgres import open_postgres

    from .backends import schema_url

    url = schema_url(postgres, str(tmp_path))
    harness = populated(open_harness(open_postgres(url)))
    accept(harness, group(3, 1), group(5, 1))
    named = harness.task().curriculum
    (tmp_path / "config.toml").write_text(f'[coordinator]\ndatabase = "{url}"\n')
    pages = open_pages(tmp_path / "coordinator")
    assert named and pages.digest(1) == named and pages.page(named) == harness.pool.curriculum.pages.page(named)
