"""Submissions that contain slow programs, written by the worker or by the run's own model."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config
from shoal.protocol.messages import HARD, Reason
from shoal.store.rollouts import Rollout
from shoal.validator.case import Case
from shoal.validator.judge import LATE, Judge
from shoal.validator.service import Validator
from shoal.worker.produce import Producer

from ..conftest import tiny_tokenizer
from ..turns import Echo
from ..turns import config as turns_config
from ..workers import produced, signed
from .support import ASSIGNMENT, case_of, checked, claim, config, make_producer, make_validator

pytestmark = pytest.mark.usefixtures("one_thread")

ENDLESS = "while 1:0"  # at most 40 characters, each of them a token
WALL_S = 12.0
SUMS = {"kind": "stdin", "cases": [{"input": "1", "output": "1"}]}


def settings(folder: Path, **sandbox: float) -> Config:
    """Return a config whose tasks ask for programs that echo a number. Each program may run for 12 s."""
    rows = [{"question": str(n), "tests": json.dumps(SUMS)} for n in range(400)]
    path = folder / "programs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(path), "reward": "code", "fields": {"question": "question", "tests": "tests"}}
    limits = {"cpu_s": WALL_S} | sandbox
    return config(tasks={"sources": [source], "length_targets": [], "sandbox": limits})


@pytest.fixture(scope="module")
def programs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return settings(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def worker(programs: Config, tiny_folder: Path) -> Producer:
    return make_producer(tiny_folder, programs)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def honest(worker: Producer) -> list[Rollout]:
    return produced(worker, ASSIGNMENT)


@pytest.fixture
def validator(programs: Config, tiny_folder: Path) -> Iterator[Validator]:
    made = make_validator(tiny_folder, programs)
    with made.judge:
        yield made


def made_up(row: Rollout, program: str = ENDLESS) -> Rollout:
    """Replace the completion by a program that the worker wrote, with a well-formed but false proof."""
    tokens = [*tiny_tokenizer().encode(program, add_special_tokens=False), 1]
    return replace(row, tokens=tokens, logprobs=[-1.0] * len(tokens), proofs=row.proofs[:1])


def prefilled(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each later prefill appends its number of rollouts."""
    sizes: list[int] = []
    prefill = judge.prefill
    monkeypatch.setattr(judge, "prefill", lambda cases: sizes.extend(len(c.rows) for c in cases) or prefill(cases))
    return sizes


def test_programs_that_a_worker_wrote_are_detected_before_they_reach_their_limits(
    validator: Validator, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spot check draws honest rollouts. Grading then takes too long, so a whole prefill finds the others."""
    monkeypatch.setattr(validator.judge, "choose", lambda numbers, k: [6, 7])
    sizes = prefilled(validator.judge, monkeypatch)
    rows = [*map(made_up, honest[:4]), *honest[4:]]
    verdict, accepted = checked(validator, claim(full=False), signed(worker, ASSIGNMENT, rows))
    assert verdict.reason in HARD and accepted is None
    assert verdict.reason is not Reason.ENVIRONMENT, "the checks of the prefill must find the lie"
    assert sizes == [2, 8, 8], "there must be a spot check, a whole prefill, and another with reloaded weights"


def test_programs_that_end_in_time_cost_no_prefill(
    validator: Validator, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.validator.judge.MIN_GRADING_S", 600.0)
    sizes = prefilled(validator.judge, monkeypatch)
    verdict, accepted = checked(validator, claim(full=False), signed(worker, ASSIGNMENT, honest))
    assert verdict.reason is None and accepted is not None and sizes == [2]
    assert validator.judge.budget.left_s == math.inf, "the time limit must end with the submission"


def slow_model(judge: Judge, monkeypatch: pytest.MonkeyPatch, groups: set[int]) -> None:
    """Grade endless programs instead of the completions of these groups, and let the time budget end soon."""
    grade = judge.graders.grade
    task_ids: list[str] = []

    def endless(tasks: Any, completions: Any) -> Any:
        if tasks[0].id not in task_ids:
            task_ids.append(tasks[0].id)
        if task_ids.index(tasks[0].id) not in groups:
            return grade(tasks, completions)
        judge.budget.start(0.5)
        return grade(tasks, [ENDLESS] * len(completions))

    monkeypatch.setattr(judge.graders, "grade", endless)


def test_slow_programs_of_the_runs_own_model_are_blamed_on_nobody(
    validator: Validator, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group not graded in time is accepted and paid, but no batch takes it and it is no evidence on its worker."""
    slow_model(validator.judge, monkeypatch, {1})
    for full in (True, False):
        verdict, accepted = checked(validator, claim(full=full), signed(worker, ASSIGNMENT, honest))
        assert verdict.reason is None and accepted is not None
        first, second = verdict.groups
        assert first.outcomes.grader_error == 0 and second.outcomes.grader_error == 4
        assert verdict.opinion.spent is None
    monkeypatch.undo()
    verdict, _ = checked(validator, claim(), signed(worker, ASSIGNMENT, honest))
    assert verdict.opinion.spent is not None, "a submission that is graded in time must count as evidence"


def test_one_slow_submission_takes_no_time_from_the_others(
    validator: Validator, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = validator.judge
    judge.grading_s = 6.0
    case = case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, honest))
    clock = Ticking()
    judge.budget.clock = clock
    shares: list[float] = []
    start = judge.budget.start
    monkeypatch.setattr(judge.budget, "start", lambda seconds: shares.append(seconds) or start(seconds))

    def grade(tasks: Any, completions: Any) -> Any:
        clock.now_s += 5.0
        return [LATE] * len(completions)

    monkeypatch.setattr(judge.graders, "grade", grade)
    judge.examine([case, case, case])
    assert shares == [2.0] * 3
    shares.clear()
    judge.examine([case, case], cheaply=[True, True])
    assert shares == [0.75, 0.75, 3.0, 3.0], "before a prefill, grading must get a quarter of a case's share"


class Ticking:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_before_a_prefill_grading_may_take_as_long_as_the_prefill(
    validator: Validator, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = validator.judge
    judge.grading_s = 1e6
    case, clock = case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, honest)), Ticking()
    judge.budget.clock = clock
    prefill = judge.prefill

    def slow(cases: list[Case]) -> list[Case]:
        clock.now_s += 40.0 * len(cases)
        return prefill(cases)

    monkeypatch.setattr(judge, "prefill", slow)
    # The durations of three gradings, twice: one in time, one that takes too long, and its repetition after the
    # prefill.
    takes_s = iter([0.5, 1.5, 0.0, 39.0, 41.0, 0.0])

    def grade(case: Case) -> Case:
        clock.now_s += next(takes_s)
        return replace(case, rewards=[0.0] * len(case.rows), grades=[LATE] * len(case.rows))

    monkeypatch.setattr(judge, "grade", grade)

    def whole() -> bool:
        [examined] = judge.examine([case], cheaply=[True])
        assert examined.finding is None
        return examined.case.prefill is not None

    assert [whole(), whole()] == [False, True], "before the first prefill, the limit must be a second"
    assert [whole(), whole()] == [False, True], "then the limit must be the time of the last prefill"


@pytest.mark.usefixtures("echo")
def test_answers_that_cannot_be_repeated_in_time_are_rejected_softly(
    talkative_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_producer(talkative_folder, turns_config())
    data = made.submission(ASSIGNMENT)
    validator = make_validator(talkative_folder, turns_config())
    with validator.judge as judge:
        assert checked(validator, claim(), data)[0].reason is None
        clock = Ticking()
        judge.budget.clock, judge.grading_s = clock, 6.0
        respond = Echo.respond

        def slow(*arguments: Any) -> str | None:
            clock.now_s += 7.0
            return None if clock.now_s > 6.0 else respond(*arguments)  # an interrupted answer may look like a lie

        monkeypatch.setattr(Echo, "respond", slow)
        for full in (True, False):
            clock.now_s = 0.0
            assert checked(validator, claim(full=full), data)[0].reason is Reason.UNREPEATABLE
