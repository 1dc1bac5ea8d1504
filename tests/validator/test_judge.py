"""Submissions judged together get the same results as alone. Spot-checked work must still pass every cheap check."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.trust.adversary.cheats import QuantizedWeights

from shoal.model.sampling import LOWEST_LOGPROB
from shoal.protocol.messages import MILLION, Outcomes, Reason
from shoal.store.columns import PROOF_BYTES
from shoal.store.rollouts import Rollout, read_accepted
from shoal.tasks import Grade
from shoal.tasks.prompt import completion_text
from shoal.toploc import build
from shoal.validator.case import Case, Finding
from shoal.validator.judge import Examined, Judge
from shoal.validator.service import Validator
from shoal.validator.verdict import group_results
from shoal.worker.produce import Producer

from ..workers import ALICE, VALIDATOR, signed
from .support import ASSIGNMENT, SETTINGS, assignment, case_of, make_producer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def judge(validator: Validator) -> Judge:
    return validator.judge


@pytest.fixture(scope="module")
def files(tiny_folder: Path, worker: Producer) -> list[bytes]:
    """Return files for the first four tasks: honest, from quantised weights, and two honest ones."""
    return [
        worker.submission(assignment(0)),
        make_producer(tiny_folder, SETTINGS, QuantizedWeights).submission(assignment(1)),
        worker.submission(assignment(2)),
        worker.submission(assignment(3)),
    ]


def opened(judge: Judge, files: list[bytes]) -> list[Case]:
    return [case_of(judge, assignment(number), data) for number, data in enumerate(files)]


def reasons(examined: list[Examined]) -> list[Reason | None]:
    return [result.finding and result.finding.reason for result in examined]


def test_submissions_judged_together_get_the_results_of_each_alone(judge: Judge, files: list[bytes]) -> None:
    cases = opened(judge, files)
    together, alone = judge.examine(cases), [judge.examine([case])[0] for case in cases]
    assert [one.finding for one in together] == [one.finding for one in alone]
    assert reasons(together) == [None, Reason.PROOF, None, None]
    assert together[1].case.rewards == [], "a case that fails a check of the prefill must not be graded"
    for one, other in zip(together, alone, strict=True):
        assert one.case.rewards == other.case.rewards
        assert one.evidence == pytest.approx(other.evidence, abs=1e-3)
        a, b = one.case.computed(), other.case.computed()
        assert a.lengths == b.lengths == [len(row.tokens) for row in one.case.rows]
        torch.testing.assert_close(a.logprobs_N, b.logprobs_N, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.margins_N, b.margins_N, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.evidence_NA, b.evidence_NA, atol=1e-3, rtol=0)
        torch.testing.assert_close(a.hidden_NH.float(), b.hidden_NH.float(), atol=0.05, rtol=0.02)


def test_a_spot_checked_case_has_no_prefill_and_keeps_the_workers_logprobs(
    judge: Judge, files: list[bytes], worker: Producer
) -> None:
    examined = judge.examine(opened(judge, files), cheaply=[True, True, False, True])
    assert reasons(examined) == [None, Reason.PROOF, None, None], "two rollouts must reveal quantised weights"
    cases = [result.case for result in examined]
    assert [case.prefill is None for case in cases] == [True, False, False, True]
    claimed = [row.logprobs for row in cases[0].rows]
    accepted = read_accepted(judge.accepted_file(cases[0], VALIDATOR), max_rows=8, max_tokens=4096)
    assert [row.logprobs for row in accepted.rows] == claimed and not accepted.header.prefilled
    assert [row.reward for row in accepted.rows] == pytest.approx(cases[0].rewards)
    checked = read_accepted(judge.accepted_file(cases[2], VALIDATOR), max_rows=8, max_tokens=4096)
    own = [logprob for row in checked.rows for logprob in row.logprobs]
    assert own == cases[2].computed().logprobs_N.tolist() and checked.header.prefilled


def test_a_case_with_an_impossible_logprob_is_prefilled_whole(
    judge: Judge, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner drops a group with such a logprob, so a batch could be empty if a spot check accepted it."""
    monkeypatch.setattr(judge, "choose", lambda of, k: [6, 7])  # the spot check draws other rollouts
    [case, *_] = opened(judge, files)
    row = case.rows[0]
    for logprob, prefilled in ((LOWEST_LOGPROB, False), (LOWEST_LOGPROB - 0.1, True)):
        rows = [replace(row, logprobs=[logprob, *row.logprobs[1:]]), *case.rows[1:]]
        [examined] = judge.examine([replace(case, rows=rows)], cheaply=[True])
        assert (examined.case.prefill is not None) == prefilled


def test_a_file_with_more_rollouts_than_its_task_is_not_read(
    judge: Judge, worker: Producer, honest: list[Rollout]
) -> None:
    """Its worker may use another nonce, which makes the rejection soft, so the memory for such a file must be bounded."""
    data = signed(worker, ASSIGNMENT, [*honest, honest[0]])
    finding = judge.open(ASSIGNMENT, ALICE.public, data)
    assert finding == Finding(Reason.UNREADABLE, "9 rows; between 1 and 8 are allowed")


def test_hand_written_answers_fail_the_spot_check(
    judge: Judge, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model generated the tokens of these answers. The proofs are null, or copied from another rollout."""
    written = [replace(row, tokens=[5, 1], logprobs=[-1.0, -1.0], proofs=[bytes(PROOF_BYTES)]) for row in honest]
    assert reasons(
        judge.examine([case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, written))], cheaply=[True])
    ) == [Reason.PROOF]
    sizes: list[int] = []
    prefill = judge.prefill
    monkeypatch.setattr(judge, "prefill", lambda cases: sizes.extend(len(c.rows) for c in cases) or prefill(cases))
    copied = [replace(row, proofs=honest[0].proofs[:1]) for row in written]
    results = reasons(judge.examine([case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, copied))], cheaply=[True]))
    assert results == [Reason.PROOF] and sizes == [2, 8], "a whole prefill must follow the spot check"


def test_a_spot_check_prefills_two_rollouts_drawn_after_the_upload(
    judge: Judge, files: list[bytes], worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rollout of eight is false, the submission passes unless that rollout is drawn."""
    other = make_false(honest[6])
    rows = [*honest[:6], other, honest[7]]
    case = case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, rows))
    draws: list[tuple[int, int]] = []

    def drawn(*numbers: int) -> list[Reason | None]:
        def choose(of: Sequence[int], k: int) -> list[int]:
            draws.append((len(of), k))
            return list(numbers)

        monkeypatch.setattr(judge, "choose", choose)
        [examined] = judge.examine([case], cheaply=[True])
        assert (examined.case.prefill is None) == (6 not in numbers)
        return reasons([examined])

    assert drawn(0, 7) == drawn(5, 1) == [None]
    assert drawn(6, 0) == drawn(3, 6) == [Reason.PROOF]
    assert draws == [(8, 2)] * 4


def make_false(row: Rollout) -> Rollout:
    return replace(row, proofs=[build_proof(number) for number in range(len(row.proofs))])


def build_proof(number: int) -> bytes:
    hidden_TH = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
    return build(hidden_TH)[0]


def test_accepted_rewards_are_the_validators_own(judge: Judge, files: list[bytes]) -> None:
    [case, *_] = opened(judge, files)
    graded = judge.grade(case)
    texts = [completion_text(judge.tokenizer, row.tokens) for row in case.rows]
    scores = [grade.score for grade in judge.graders.grade([case.tasks[row.group] for row in case.rows], texts)]
    penalties = [0.0003 * abs(row.target_length - len(row.tokens)) for row in case.rows]
    assert graded.rewards == pytest.approx([score - penalty for score, penalty in zip(scores, penalties, strict=True)])
    assert case.rewards == []


def test_lies_found_by_cheap_checks_are_rejected_without_a_prefill(
    judge: Judge, worker: Producer, honest: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cases: list[Case]) -> list[Case]:
        assert not cases, "a lie that the file itself shows must not cause a prefill"
        return []

    monkeypatch.setattr(judge, "prefill", fail)
    first = honest[0]
    cut = replace(first, tokens=first.tokens[:5], logprobs=first.logprobs[:5], proofs=first.proofs[:1])
    for rows, reason in [
        ([cut, *honest[1:]], Reason.TERMINATION),
        ([replace(first, seed=first.seed + 1), *honest[1:]], Reason.TASKS),
        ([replace(first, proofs=[]), *honest[1:]], Reason.BOUNDS),
    ]:
        for cheaply in (None, [True]):
            assert reasons(
                judge.examine([case_of(judge, ASSIGNMENT, signed(worker, ASSIGNMENT, rows))], cheaply=cheaply)
            ) == [reason]


def test_completions_that_the_runs_model_did_not_write_are_never_graded(
    judge: Judge, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grading may run the program in a completion, and the worker could have written that program."""
    graded = []
    grade = judge.grade
    monkeypatch.setattr(judge, "grade", lambda case: graded.append(case.assignment.number) or grade(case))
    cases = opened(judge, files)
    judge.examine(cases)
    assert graded == [0, 2, 3]
    graded.clear()
    judge.examine(cases, cheaply=[True] * 4)
    assert graded == [0, 2, 3], "the same cases must be graded after the spot check alone"


def test_a_groups_report_has_its_task_and_target_length_and_scores_and_outcomes(
    judge: Judge, files: list[bytes]
) -> None:
    case = judge.grade(opened(judge, files)[0])
    grades = [
        Grade(1.0),
        Grade(1 / 3),
        Grade(0.0, "wrong_format", "no number"),
        Grade(0.0, "grader_error", "x" * 600),
        *([Grade(0.5)] * 4),
    ]
    first, second = group_results(replace(case, grades=grades), judge.tokenizer)
    assert (first.task, first.target_length) == (case.plans[0].task_index, case.plans[0].target_length)
    assert first.source == second.source == "arithmetic"
    assert first.score_millionths == MILLION + 333_333
    assert first.outcomes == Outcomes(graded=2, wrong_format=1, grader_error=1)
    assert second.outcomes == Outcomes(graded=4) and second.score_millionths == 2 * MILLION
    assert first.reward_mean == pytest.approx(sum(case.rewards[:4]) / 4)
    assert first.parts == {}


def test_a_groups_report_lists_every_reward_and_omits_the_folder_of_reward_files(
    judge: Judge, files: list[bytes]
) -> None:
    case = judge.grade(opened(judge, files)[0])
    scores = [(1.0, 0.5), (0.0, 0.25), (0.0, 0.25), (0.0, 0.0)] * 2
    grades = [Grade(exact, parts={"/home/ann/mine.py:exact": exact, "number": number}) for exact, number in scores]
    first, _ = group_results(replace(case, grades=grades), judge.tokenizer)
    assert first.parts == {"mine.py:exact": 0.25, "number": 0.25}
