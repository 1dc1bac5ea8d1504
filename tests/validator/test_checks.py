"""Each lie is rejected with its own reason; honest work passes every check."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import toploc
from shoal.config.sections import MISMATCH_SHARE
from shoal.model.load import load_model, save_model
from shoal.protocol.messages import Reason
from shoal.store import rollouts as rollout_file
from shoal.store.rollouts import Rollout
from shoal.validator.case import Case
from shoal.validator.checks import (
    DISTRIBUTION_EVIDENCE,
    EXPENSIVE,
    OUTLIERS,
    Rules,
    distribution,
    endings,
    logprobs,
    run,
    sampling,
    special_tokens,
    termination,
)
from shoal.validator.rounding import FAR
from shoal.validator.service import Validator
from shoal.validator.spending import spent
from shoal.validator.verdict import Result
from shoal.worker.produce import Producer

from ..workers import ALICE, BOB, produced, signed
from .support import (
    ASSIGNMENT,
    EOS,
    GROUP_SIZE,
    MAX_TOKENS,
    SETTINGS,
    USER,
    assignment,
    case_of,
    config,
    judged,
    make_producer,
    make_validator,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def verdict_on(worker: Producer, validator: Validator) -> Callable[[list[Rollout]], Result]:
    """Return a function that gives the verdict on rows that Alice signed for her assignment."""
    return lambda rows: judged(validator, ASSIGNMENT, signed(worker, ASSIGNMENT, rows))


@pytest.fixture
def rules(validator: Validator) -> Rules:
    return validator.judge.rules


def with_row(rows: list[Rollout], number: int, **changed: Any) -> list[Rollout]:
    return [replace(row, **changed) if i == number else row for i, row in enumerate(rows)]


# --- honest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_honest_work_is_accepted(worker: Producer, validator: Validator, number: int) -> None:
    given = assignment(number, step=number)
    verdict = judged(validator, given, worker.submission(given))
    assert verdict.reason is None, verdict.detail
    assert verdict.evidence["margin_max"] < 1e-3


@pytest.mark.parametrize(
    "sections",
    [
        {"tasks": {"length_targets": []}},
        {"sampling": {"temperature": 0.6}},
        {"sampling": {"temperature": 1.7}},
        {"tasks": {"length_penalty": 1000.7}},  # files store these rewards as float32
    ],
    ids=["no targets", "cooler", "hotter", "rewards of thousands"],
)
def test_honest_work_under_other_settings_is_accepted(tiny_folder: Path, sections: dict[str, Any]) -> None:
    settings = config(**sections)
    worker = make_producer(tiny_folder, settings)
    verdict = judged(make_validator(tiny_folder, settings), ASSIGNMENT, worker.submission(ASSIGNMENT))
    assert verdict.reason is None, verdict.detail


@pytest.mark.parametrize("sharper", [1.0, 3.0])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_honest_work_in_another_dtype_uses_at_most_half_of_each_limit(
    tiny_folder: Path, tmp_path: Path, dtypes: Any, sharper: float
) -> None:
    folder, limits = sharpened(tiny_folder, tmp_path / "model", sharper), SETTINGS.validator
    worker = make_producer(folder, SETTINGS, dtype=dtypes[0])
    validator = make_validator(folder, SETTINGS, dtype=dtypes[1])
    for number in range(3):
        given = assignment(number)
        [examined] = validator.judge.examine([case_of(validator.judge, given, worker.submission(given))])
        assert examined.finding is None, examined.finding
        rows, prefill = examined.case.rows, examined.case.computed()
        of_rows = toploc.verify_many(list(prefill.hidden_NH.split(prefill.lengths)), [row.proofs for row in rows])
        for chunk in [chunk for chunks in of_rows for chunk in chunks]:
            assert chunk.exponent_mismatches <= toploc.BFLOAT16.exponent_mismatches / 2
            assert chunk.mantissa_error_mean <= toploc.BFLOAT16.mantissa_error_mean / 2
        claimed_N = torch.tensor([logprob for row in rows for logprob in row.logprobs])
        assert float((claimed_N - prefill.logprobs_N).abs().mean()) <= limits.logprob_error_mean / 2
        assert float((prefill.margins_N > limits.sampling_margin).float().mean()) <= MISMATCH_SHARE / 2


def sharpened(folder: Path, to: Path, factor: float) -> Path:
    """Save the model in `folder` with its logits multiplied by `factor`."""
    from shoal.model.load import load_tokenizer

    model = load_model(folder)
    with torch.no_grad():
        model.base_model.norm.weight.mul_(factor)
    save_model(model, load_tokenizer(folder), to)
    return to


# --- figures -------------------------------------------------------------------------------------------------------


def first_is(name: str, value: float) -> Callable[[Rollout], dict[str, Any]]:
    return lambda row: {name: [value, *getattr(row, name)[1:]]}


@pytest.mark.parametrize(
    "change",
    [
        *(first_is("logprobs", value) for value in (float("nan"), float("inf"), float("-inf"), 0.5, -1e5)),
        *(first_is("tokens", value) for value in (64, -1, 2**31 - 1, -(2**31))),
        lambda row: {"tokens": [], "logprobs": [], "proofs": []},
        lambda row: {"logprobs": row.logprobs[:-1]},
        lambda row: {"proofs": row.proofs[:-1]},
        lambda row: {"proofs": [*row.proofs, row.proofs[0]]},
        lambda row: {"proofs": []},
    ],
)
def test_logprobs_or_tokens_or_counts_out_of_range_are_rejected(
    honest: list[Rollout], verdict_on: Callable[..., Result], change: Callable[[Rollout], dict[str, Any]]
) -> None:
    fewer = with_row(honest, 1, proofs=[])  # so that a change may add a proof without exceeding the file's limit
    verdict = verdict_on(with_row(fewer, 0, **change(honest[0])))
    assert verdict.reason is Reason.BOUNDS and verdict.detail.startswith("rollout 0")


@pytest.mark.parametrize(
    "proof", [b"\xff" * 258, (40_000).to_bytes(2, "big") + b"\x12" * 256], ids=["malformed", "other"]
)
def test_one_false_proof_among_honest_ones_is_rejected(
    honest: list[Rollout], verdict_on: Callable[..., Result], proof: bytes
) -> None:
    verdict = verdict_on(with_row(honest, 0, proofs=[honest[0].proofs[0], proof]))
    assert verdict.reason is Reason.PROOF


# --- work for other tasks --------------------------------------------------------------------------------------------


def test_work_for_another_submission_number_is_rejected(worker: Producer, validator: Validator) -> None:
    """The rows are signed twice: with the prompts of the assignment, and with those of the other task."""
    lucky = assignment(17)
    rows, prompts = produced(worker, lucky), [worker.prompt(plan) for plan in worker.plan(lucky)]
    for data in (signed(worker, ASSIGNMENT, rows), worker.sign(ASSIGNMENT, prompts, rows)):
        assert judged(validator, ASSIGNMENT, data).reason is Reason.TASKS


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1],
        lambda rows: rows[:GROUP_SIZE],
        lambda rows: rows[GROUP_SIZE:] + rows[:GROUP_SIZE],
        lambda rows: [*rows[:-1], rows[0]],
        lambda rows: with_row(rows, 3, group=-7),
        lambda rows: with_row(rows, 3, group=2**31 - 1),
        lambda rows: with_row(rows, 3, seed=-1),
        lambda rows: [replace(row, seed=row.seed + 1) for row in rows],
        lambda rows: [replace(row, target_length=1) for row in rows],
    ],
)
def test_missing_or_moved_or_doubled_rows_and_wrong_seeds_or_targets_are_rejected(
    honest: list[Rollout], verdict_on: Callable[..., Result], change: Callable[[list[Rollout]], list[Rollout]]
) -> None:
    verdict = verdict_on(change(honest))
    assert verdict.reason is Reason.TASKS


# --- single tokens ---------------------------------------------------------------------------------------------------


@pytest.fixture
def case(validator: Validator, worker: Producer, honest: list[Rollout]) -> Case:
    """Return honest work with its prefill."""
    return validator.judge.prefill([case_of(validator.judge, ASSIGNMENT, signed(worker, ASSIGNMENT, honest))])[0]


def at(case: Case, rollouts: int = 1, **figures: float) -> Case:
    """Set these figures at the last token of each of the first rollouts."""
    prefill = case.computed()
    changed = {name: tensor.clone() for name, tensor in vars(prefill).items() if name in figures}
    for name, tensor in changed.items():
        for number in range(rollouts):
            tensor[sum(prefill.lengths[: number + 1]) - 1] = figures[name]
    return replace(case, prefill=replace(prefill, **changed))  # type: ignore[arg-type]


def ending(case: Case, token: int, rollouts: int = OUTLIERS + 1) -> Case:
    """Set the last token of each of the first rollouts."""
    changed = [replace(row, tokens=[*row.tokens[:-1], token]) for row in case.rows[:rollouts]]
    return replace(case, rows=[*changed, *case.rows[rollouts:]])


@pytest.mark.parametrize("token", [20, USER, EOS])
def test_a_token_with_a_margin_near_the_limit_passes_every_check(rules: Rules, case: Case, token: int) -> None:
    """A worker that fails one of these checks is slashed, so each must tolerate the errors that numerics can cause."""
    changed = at(ending(case, token, 1), logprobs_N=-9.0, margins_N=1.5 * SETTINGS.validator.sampling_margin)
    assert run([sampling, termination, special_tokens], rules, changed).finding is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["hidden_NH", "logprobs_N", "margins_N", "evidence_NA"])
def test_a_prefill_that_is_not_finite_says_nothing_against_the_worker(
    rules: Rules, case: Case, name: str, value: float
) -> None:
    """The version, or the validator's memory, is broken. Every check after it would judge noise."""
    tensor = getattr(case.computed(), name).clone()
    tensor[0] = value
    changed = replace(case, prefill=replace(case.computed(), **{name: tensor}))
    finding = run(EXPENSIVE, rules, changed).finding
    assert (
        finding is not None and finding.reason is Reason.UNREPEATABLE and f"{name} contains {value}" in finding.detail
    )


def test_a_negative_margin_is_not_the_workers_fault(rules: Rules, case: Case) -> None:
    finding = run(EXPENSIVE, rules, at(case, margins_N=-0.5)).finding
    assert finding is not None and finding.reason is Reason.UNREPEATABLE and "margins_N contains -0.5" in finding.detail


@pytest.mark.parametrize(
    ("margins", "tokens", "rejects"),
    [
        ([1.5] * 2, 300, False),
        ([1.5] * 3, 300, True),
        ([FAR + 0.1], 300, True),
        ([1.5], 50, False),  # the mean must exclude outliers, or one would fail a small submission
        ([1.5] * 2, 50, True),  # chance explains at most one in so few tokens
        ([1.5] * 2, 71, False),
        ([-0.1], 300, True),
        ([math.nan], 300, True),
        ([0.9] * 5, 50, True),  # the mean is too high
    ],
    ids=["two", "three", "one far away", "one of few", "two of few", "two of enough", "negative", "nan", "many near"],
)
def test_only_a_few_tokens_slightly_beyond_the_margin_pass(
    rules: Rules, case: Case, margins: list[float], tokens: int, rejects: bool
) -> None:
    margins_N = torch.zeros(tokens)
    margins_N[: len(margins)] = torch.tensor(margins) * SETTINGS.validator.sampling_margin
    changed = replace(case, prefill=replace(case.computed(), margins_N=margins_N))
    finding = sampling(rules, changed).finding
    assert (finding is not None) == rejects


@pytest.mark.parametrize(
    ("token", "logprob", "margin", "rejects"),
    [
        (EOS, -0.5, 5.0, False),  # the end token is likely
        (EOS, -9.0, 0.0, False),  # its seed yields the token
        (EOS, -9.0, 0.7, False),  # its seed yields the token within numerical error
        (EOS, -9.0, 5.0, True),
        (EOS, -2.4, 5.0, True),  # its probability is 0.09
        (20, -9.0, 5.0, False),  # not an end token
    ],
)
def test_an_end_token_must_be_likely_or_yielded(
    rules: Rules, case: Case, token: int, logprob: float, margin: float, rejects: bool
) -> None:
    assert termination(rules, case).finding is None
    for rollouts in (OUTLIERS, OUTLIERS + 1):
        changed = at(ending(case, token), rollouts, logprobs_N=logprob, margins_N=margin)
        finding = termination(rules, changed).finding
        assert (finding is not None) == (rejects and rollouts > OUTLIERS), "up to OUTLIERS must be tolerated"


@pytest.mark.parametrize(
    ("token", "margin", "rejects"), [(USER, 0.0, False), (USER, 0.7, False), (USER, 0.8, True), (EOS, 0.8, False)]
)
def test_a_special_token_must_follow_from_its_seed(
    rules: Rules, case: Case, token: int, margin: float, rejects: bool
) -> None:
    assert special_tokens(rules, case).finding is None
    for rollouts in (OUTLIERS, OUTLIERS + 1):
        finding = special_tokens(rules, at(ending(case, token), rollouts, margins_N=margin)).finding
        assert (finding is not None) == (rejects and rollouts > OUTLIERS), "up to OUTLIERS must be tolerated"


def test_tokens_too_likely_to_be_samples_are_rejected_even_if_their_seeds_yield_them(rules: Rules, case: Case) -> None:
    prefill = case.computed()
    assert distribution(rules, case).finding is None
    truncated = replace(prefill, evidence_NA=prefill.evidence_NA + torch.tensor([0.0, 0.0, 1.0, 0.0]))
    outcome = distribution(rules, replace(case, prefill=truncated))
    finding = outcome.finding
    assert finding is not None and finding.reason is Reason.DISTRIBUTION and "truncated" in finding.detail
    assert outcome.evidence["distribution_evidence"] > DISTRIBUTION_EVIDENCE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: [*tokens[:9], EOS, *tokens[10:]], "continues after an end token"),
        (lambda tokens: [20] * 9, "stops after 9 tokens"),
        (lambda tokens: [*[20] * 9, EOS], ""),
        (lambda tokens: [20] * MAX_TOKENS, ""),
        (lambda tokens: [EOS], ""),
    ],
)
def test_a_completion_must_run_to_its_end_and_no_further(
    rules: Rules, case: Case, change: Callable[[list[int]], list[int]], words: str
) -> None:
    full = next(i for i, row in enumerate(case.rows) if len(row.tokens) == MAX_TOKENS)
    rows = with_row(case.rows, full, tokens=change(case.rows[full].tokens))
    finding = endings(rules, replace(case, rows=rows, prefill=None)).finding
    assert words in finding.detail if finding else words == ""


# --- signer and assignment -------------------------------------------------------------------------------------------


def test_another_workers_rows_are_rejected_with_reason_tasks(tiny_folder: Path, honest: list[Rollout]) -> None:
    validator, thief = make_validator(tiny_folder, SETTINGS), make_producer(tiny_folder, SETTINGS, identity=BOB)
    given = assignment(worker=BOB)
    assert judged(validator, given, signed(thief, given, honest), worker=BOB).reason is Reason.TASKS


def test_a_workers_own_earlier_rollouts_are_rejected_because_their_seeds_follow_from_another_nonce(
    validator: Validator, worker: Producer, honest: list[Rollout]
) -> None:
    later = assignment(1)
    assert judged(validator, later, signed(worker, later, honest)).reason is Reason.TASKS


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"number": 1}, "made for task 1"),
        ({"step": 4}, "its header has another"),
        ({"policy_version": 1}, "its header has another"),
        ({"policy_digest": "e" * 64}, "its header has another"),
        ({"step": 4, "policy_version": 3}, "its header has another"),
        ({"nonce": "e" * 32}, "its header has another"),
        ({"groups": ASSIGNMENT.groups + 1}, "its header has another"),
        ({"run": "other-0"}, "other-0"),
    ],
)
def test_a_header_with_another_assignment_or_run_is_rejected(
    tiny_folder: Path, validator: Validator, honest: list[Rollout], changed: dict[str, Any], words: str
) -> None:
    liar = make_producer(tiny_folder, SETTINGS)
    prompts = [liar.prompt(plan) for plan in liar.plan(ASSIGNMENT)]
    liar.run = changed.get("run", liar.run)
    verdict = judged(validator, ASSIGNMENT, liar.sign(ASSIGNMENT.model_copy(update=changed), prompts, honest))
    assert verdict.reason is Reason.CONTEXT and words in verdict.detail


def test_a_file_signed_for_other_prompts_is_rejected(
    worker: Producer, validator: Validator, honest: list[Rollout]
) -> None:
    prompts = [worker.prompt(plan) for plan in worker.plan(ASSIGNMENT)]
    for other in (prompts[::-1], prompts[:1], [[*prompts[0], 5], prompts[1]], []):
        verdict = judged(validator, ASSIGNMENT, worker.sign(ASSIGNMENT, other, honest))
        assert verdict.reason is Reason.CONTEXT and "the signed prompts are not" in verdict.detail
    assert judged(validator, ASSIGNMENT, worker.sign(ASSIGNMENT, prompts, honest)).reason is None


@pytest.mark.parametrize("honestly", [False, True])
def test_a_file_that_another_worker_signed_is_rejected_with_reason_signature(
    worker: Producer, validator: Validator, honest: list[Rollout], honestly: bool
) -> None:
    """Bob signs, and names himself or Alice as the signer. If that passed, Alice could be slashed for his file."""
    theirs = judged(validator, assignment(worker=BOB), signed(worker, ASSIGNMENT, honest), worker=BOB)
    assert theirs.reason is Reason.SIGNATURE

    class Impostor(type(BOB)):  # type: ignore[misc]
        public = ALICE.public

    header = rollout_file.read_submission(
        signed(worker, ASSIGNMENT, honest), max_rows=len(honest), max_tokens=SETTINGS.sampling.max_tokens
    ).header
    signer = BOB if honestly else Impostor(BOB.private_key)
    verdict = judged(validator, ASSIGNMENT, rollout_file.write_submission(header, honest, signer))
    assert verdict.reason is Reason.SIGNATURE and (BOB.public[:16] in verdict.detail) == honestly


# --- limits per engine and device ------------------------------------------------------------------------------------


MARGIN = SETTINGS.validator.sampling_margin
WIDE = {"sampling_margin": 4 * MARGIN, "logprob_error_mean": 1.0}
FIGURES = dict.fromkeys(
    ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean", "distribution_evidence"), 0.0
)


@pytest.mark.parametrize(("kind", "rejects"), [("vllm/cpu", False), ("", True), ("vllm/cuda", True)])
def test_each_engine_has_its_own_limits(tiny_folder: Path, kind: str, rejects: bool) -> None:
    settings = config(validator={"limits": {"vllm/cpu": WIDE}, "sampling_margin_mean": 1e6})
    judge = make_validator(tiny_folder, settings).judge
    worker: Any = make_producer(tiny_folder, settings)
    worker.kind = kind
    data = Producer.sign(
        worker, ASSIGNMENT, [worker.prompt(plan) for plan in worker.plan(ASSIGNMENT)], produced(worker, ASSIGNMENT)
    )
    case = judge.prefill([case_of(judge, ASSIGNMENT, data)])[0]
    assert case.header.engine == kind
    prefill = case.computed()
    off = replace(prefill, margins_N=prefill.margins_N + 2 * MARGIN, logprobs_N=prefill.logprobs_N - 0.5)
    case = replace(case, prefill=off)
    for check in (sampling, logprobs):
        assert (check(judge.rules, case).finding is not None) == rejects, check.__name__
    assert termination(judge.rules, case) and special_tokens(judge.rules, case)
    beyond = spent(judge.grade(case), settings, FIGURES).beyond[-1]
    assert (beyond > 0) == rejects, "the evidence over many submissions must use the limits of the same engine"
