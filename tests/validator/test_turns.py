"""Rollouts in several turns: honest ones are accepted; a changed answer of the environment is rejected."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.trust.adversary.cheats import CHEATS

from shoal.model.turns import model_positions, model_spans, model_tokens
from shoal.protocol.messages import HARD, Reason, Verdict
from shoal.store.columns import RolloutFileError
from shoal.store.rollouts import Rollout, read_accepted, read_submission
from shoal.tasks import Grade, Task
from shoal.tasks.environments import close
from shoal.validator.by_hand import read_header
from shoal.validator.checks import OUTLIERS, endings, special_tokens, termination
from shoal.validator.rounding import FAR
from shoal.validator.service import Validator
from shoal.worker.produce import Producer

from ..turns import ENDS, EOS, MAX_TOKENS, MAX_TURNS, USER, config
from ..workers import ALICE, produced, signed
from .support import ASSIGNMENT, assignment, case_of, checked, claim, judged, make_producer, make_validator

pytestmark = pytest.mark.usefixtures("one_thread", "echo")


@pytest.fixture(scope="module")
def worker(talkative_folder: Path, echo: None) -> Producer:
    return make_producer(talkative_folder, config())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def validator(talkative_folder: Path, echo: None) -> Validator:
    return make_validator(talkative_folder, config())


@pytest.fixture(scope="module")
def honest(worker: Producer) -> list[Rollout]:
    return produced(worker, ASSIGNMENT)


@pytest.fixture(scope="module")
def turned(honest: list[Rollout]) -> int:
    """Return the number of a row with several turns whose last turn is not cut off."""
    return next(n for n, row in enumerate(honest) if row.turns and row.tokens[-1] in ENDS)


def verdict_on(
    validator: Validator, worker: Producer, honest: list[Rollout], number: int, *, full: bool = True, **changed: Any
) -> Verdict:
    """Return the verdict on these rows after changing the row `number`.

    With `full=False`, a spot check prefills only other rows, so the changed row is not rejected for its proofs.
    """
    validator.judge.choose = lambda of, k: [n for n in of if n != number][:k]  # a spot check draws other rows
    rows = [replace(row, **changed) if n == number else row for n, row in enumerate(honest)]
    return checked(validator, claim(full=full), signed(worker, ASSIGNMENT, rows))[0]


# --- honest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_honest_conversations_are_accepted(worker: Producer, validator: Validator, number: int) -> None:
    given = assignment(number, step=number)
    data = worker.submission(given)
    rows = read_submission(data, max_rows=8, max_tokens=MAX_TOKENS).rows
    assert any(row.turns for row in rows) and any(USER in row.tokens for row in rows), (
        "no row has several turns or USER"
    )
    verdict = judged(validator, given, data)
    assert verdict.reason is None, verdict.detail
    assert verdict.evidence["margin_max"] < 1e-3


def test_the_test_data_has_every_kind_of_ending(honest: list[Rollout], worker: Producer) -> None:
    more = [row for number in range(1, 12) for row in produced(worker, assignment(number))]
    rows = [*honest, *more]
    assert {len(row.turns) // 2 + 1 for row in rows} == set(range(1, MAX_TURNS + 1))
    assert any(len(row.tokens) == MAX_TOKENS for row in rows)
    assert any(row.tokens[-1] in ENDS and len(row.turns) == 2 for row in rows), (
        "no row ends because the environment ended it"
    )


def test_the_accepted_file_marks_the_turns(worker: Producer, validator: Validator, honest: list[Rollout]) -> None:
    verdict, data = checked(validator, claim(), signed(worker, ASSIGNMENT, honest))
    assert data is not None, verdict.detail
    rows = read_accepted(data, max_rows=8, max_tokens=512).rows  # the limit includes the prompts
    assert [(row.tokens, row.turns) for row in rows] == [(row.tokens, row.turns) for row in honest]
    assert [len(row.logprobs) for row in rows] == [model_tokens(row.turns, len(row.tokens)) for row in rows]
    for row, own in zip(rows, honest, strict=True):
        assert row.logprobs == pytest.approx(own.logprobs, abs=1e-3)
    sampled = sum(len(row.logprobs) for row in rows)
    assert sum(group.tokens for group in verdict.groups) == sampled < sum(len(row.tokens) for row in rows)


def test_results_do_not_depend_on_how_the_prefill_is_packed(
    talkative_folder: Path, worker: Producer, validator: Validator, honest: list[Rollout]
) -> None:
    data = signed(worker, ASSIGNMENT, honest)
    narrow = make_validator(talkative_folder, config())
    narrow.judge.row_tokens = 16
    one, other = (v.judge.prefill([case_of(v.judge, ASSIGNMENT, data)])[0].computed() for v in (validator, narrow))
    assert one.lengths == other.lengths
    torch.testing.assert_close(one.logprobs_N, other.logprobs_N, atol=1e-4, rtol=0)


def test_the_reward_is_for_the_last_turn_and_the_models_tokens(
    worker: Producer, validator: Validator, honest: list[Rollout]
) -> None:
    case = validator.judge.grade(case_of(validator.judge, ASSIGNMENT, signed(worker, ASSIGNMENT, honest)))
    for row, reward in zip(honest, case.rewards, strict=True):
        last = worker.tokenizer.decode(row.tokens[sum(row.turns) :], skip_special_tokens=True)
        [grade] = validator.judge.graders.grade([case.tasks[row.group]], [last])
        length = len(model_positions(row.turns, len(row.tokens)))
        assert reward == pytest.approx(grade.score - 0.0003 * abs(row.target_length - length), abs=1e-6)


def test_graders_read_only_the_last_turn(
    worker: Producer, validator: Validator, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random model solves no task, so a grader that read the whole conversation would give the same rewards."""
    last = [worker.tokenizer.decode(row.tokens[sum(row.turns) :], skip_special_tokens=True) for row in honest]
    read: list[str] = []

    class Reader:
        def grade(self, tasks: Sequence[Task], texts: Sequence[str]) -> list[Grade]:
            read.extend(texts)
            return [Grade(0.0) for _ in texts]

    monkeypatch.setattr(validator.judge, "graders", Reader())
    validator.judge.grade(case_of(validator.judge, ASSIGNMENT, signed(worker, ASSIGNMENT, honest)))
    assert read == last


# --- forged ----------------------------------------------------------------------------------------------------------


def claims(row: Rollout, own: int, **changed: Any) -> dict[str, Any]:
    """Return the changes, with as many logprobs and proofs as a row with `own` tokens of the model needs."""
    logprobs = [*row.logprobs, *[-1.0] * (own - len(row.logprobs))][:own]
    return changed | {"logprobs": logprobs, "proofs": [row.proofs[0]] * -(-own // 32)}


def all_its_own(row: Rollout) -> dict[str, Any]:
    return claims(row, len(row.tokens), turns=[])


def shifted(row: Rollout, by: int) -> dict[str, Any]:
    """Make the first turn `by` tokens longer."""
    return claims(row, len(row.logprobs) + by, turns=[row.turns[0] + by, row.turns[1] - by, *row.turns[2:]])


def handed_over(row: Rollout) -> dict[str, Any]:
    """Attribute all tokens between the first and the last turn to the environment, so that they need no proof."""
    (_, first), *_, (start, end) = model_spans(row.turns, len(row.tokens))
    return claims(row, first + end - start, turns=[row.turns[0], sum(row.turns[1:])])


def cut_to_a_turn(row: Rollout) -> dict[str, Any]:
    """Cut the row off where the environment answers."""
    return claims(row, row.turns[0], tokens=row.tokens[: row.turns[0]], turns=[])


def goes_on(row: Rollout) -> dict[str, Any]:
    """Continue the row where the environment ended the conversation."""
    turns = [*row.turns, len(row.tokens) - sum(row.turns), 4]
    return claims(row, len(row.logprobs) + 1, tokens=[*row.tokens, USER, 10, EOS, 3, EOS], turns=turns)


def ended(row: Rollout) -> bool:
    return bool(row.turns) and row.tokens[-1] in ENDS


def of_turns(row: Rollout) -> bool:
    return bool(row.turns) and row.turns[0] > 1


@pytest.mark.parametrize(
    ("picked", "change", "full", "reason"),
    [
        (ended, all_its_own, True, Reason.TERMINATION),  # now the end token of the first turn is inside a turn
        (of_turns, lambda row: shifted(row, 1), True, Reason.TERMINATION),
        (of_turns, lambda row: shifted(row, -1), True, Reason.TERMINATION),
        (lambda row: len(row.turns) >= 4, handed_over, False, Reason.ENVIRONMENT),
        (ended, cut_to_a_turn, False, Reason.ENVIRONMENT),
        (lambda row: len(row.turns) <= 2 and len(row.tokens) < MAX_TOKENS - 6, goes_on, False, Reason.ENVIRONMENT),
    ],
    ids=["all its own", "border later", "border earlier", "handed over", "cut off", "goes on"],
)
def test_another_division_of_the_tokens_is_rejected(
    worker: Producer, validator: Validator, honest: list[Rollout], picked: Any, change: Any, full: bool, reason: Reason
) -> None:
    number, row = next((n, row) for n, row in enumerate(honest) if picked(row))
    assert verdict_on(validator, worker, honest, number, full=full, **change(row)).reason is reason


# --- hostile ---------------------------------------------------------------------------------------------------------

INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    "turns",
    [[3], [0, 1], [-1, 2], [INT32_MAX, INT32_MAX], [1, MAX_TOKENS], [1] * (MAX_TOKENS + 1)],
)
def test_turns_that_do_not_fit_the_tokens_are_unreadable(
    worker: Producer, validator: Validator, honest: list[Rollout], turned: int, turns: list[int]
) -> None:
    data = signed(worker, ASSIGNMENT, [replace(r, turns=turns) if n == turned else r for n, r in enumerate(honest)])
    assert judged(validator, ASSIGNMENT, data).reason is Reason.UNREADABLE


def test_more_turns_than_the_run_allows_are_rejected(
    worker: Producer, validator: Validator, honest: list[Rollout]
) -> None:
    number = next(n for n, row in enumerate(honest) if len(row.tokens) > 2 * MAX_TURNS)
    data = signed(
        worker, ASSIGNMENT, [replace(r, turns=[1, 1] * MAX_TURNS) if n == number else r for n, r in enumerate(honest)]
    )
    verdict = judged(validator, ASSIGNMENT, data)
    assert verdict.reason is Reason.BOUNDS and f"rollout {number}: {MAX_TURNS + 1} turns" in verdict.detail


@pytest.mark.parametrize("turns", [[3], [-1, 2], [INT32_MAX, INT32_MAX]])
def test_an_audit_refuses_turns_that_do_not_fit_the_tokens(
    worker: Producer, honest: list[Rollout], turns: list[int]
) -> None:
    data = signed(worker, ASSIGNMENT, [replace(row, turns=turns) for row in honest])
    with pytest.raises(RolloutFileError, match="do not fit"):
        read_header(data, config())


def test_several_turns_are_rejected_if_the_run_allows_only_one(talkative_folder: Path, honest: list[Rollout]) -> None:
    from .support import config as single

    settings = single(sampling={"max_tokens": MAX_TOKENS})
    plain = make_producer(talkative_folder, settings)
    rows = produced(plain, ASSIGNMENT)
    row = next(row for row in rows if len(row.tokens) > 3)
    changed = [
        replace(r, turns=[1, 1], logprobs=r.logprobs[1:], proofs=r.proofs[: -(-(len(r.tokens) - 1) // 32)])
        if r is row
        else r
        for r in rows
    ]
    verdict = judged(make_validator(talkative_folder, settings), ASSIGNMENT, signed(plain, ASSIGNMENT, changed))
    assert verdict.reason is Reason.BOUNDS


# --- checks that read only the model's tokens ------------------------------------------------------------------------


def test_end_tokens_are_checked_in_every_turn_of_the_model(
    worker: Producer, validator: Validator, honest: list[Rollout], turned: int
) -> None:
    """No seed yields these end tokens of the model, one in a middle turn. The environment may write any token."""
    judge = validator.judge
    case = judge.prefill([case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, honest))])[0]
    assert endings(judge.rules, case).finding is None and special_tokens(judge.rules, case).finding is None
    before = sum(len(row.logprobs) for row in honest[:turned])
    at = before + honest[turned].turns[0] - 1
    prefill = case.computed()
    margins_N, logprobs_N = prefill.margins_N.clone(), prefill.logprobs_N.clone()
    ends = [sum(len(row.logprobs) for row in honest[: number + 1]) - 1 for number in range(len(honest))]
    for place in [at, *ends[-OUTLIERS:]]:
        margins_N[place], logprobs_N[place] = FAR, -9.0
    odd = replace(case, prefill=replace(prefill, margins_N=margins_N, logprobs_N=logprobs_N))
    finding = termination(judge.rules, odd).finding
    assert finding is not None and finding.reason is Reason.TERMINATION
    assert finding.detail.startswith(f"{OUTLIERS + 1} ") and finding.detail.endswith(f"rollout {turned}")


def test_the_environment_gets_the_seed_of_the_rollout(worker: Producer, honest: list[Rollout], turned: int) -> None:
    row = honest[turned]
    assert worker.conversation is not None
    task = worker.tasks.train[worker.plan(ASSIGNMENT)[row.group].task_index]
    assert worker.conversation.find_fault(task, row.seed, row.tokens, row.turns) is None
    assert worker.conversation.find_fault(task, row.seed + 1, row.tokens, row.turns) is not None
    assert ALICE.public == worker.identity.public


# --- a custom environment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "reason"), [(Producer, None), (CHEATS["forged_tool"], Reason.UNREPEATABLE)])
def test_nobody_is_slashed_for_a_custom_environment(
    talkative_folder: Path, tmp_path: Path, kind: type[Producer], reason: Reason | None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Short:\n"
        "    def respond(self, task, seed, turns):\n"
        "        return str(seed % 1000 + len(task.question)) if len(turns[-1]) < 5 else None\n"
    )
    settings = config(f"{file}:Short")
    honest, validator = make_producer(talkative_folder, settings, kind), make_validator(talkative_folder, settings)
    try:
        data = honest.submission(ASSIGNMENT)
        assert any(row.turns for row in read_submission(data, max_rows=8, max_tokens=MAX_TOKENS).rows)
        verdict = judged(validator, ASSIGNMENT, data)
    finally:
        close(honest.environments)
        close(validator.judge.environments)
    assert verdict.reason is reason and reason not in HARD, verdict.detail
