"""The checks: one function for each lie, in the order in which the judge runs them.

A check takes a `Case` and returns an `Outcome`: the fault, if any, and the figures that it measured. It changes nothing.
The docstring of a check begins with a question, which `shoal audit` prints.

    FILE       read the file and the assignment
    EXPENSIVE  read the results of one prefill of the claimed version
    EXACT      read these results without tolerance, for a worker of this validator's exactness class (docs/trust.md)
    ANSWERS    query an environment again

A worker of this validator's exactness class computes the same bits for every token. EXACT runs after EXPENSIVE, because
work beyond the limits is a lie in any class. Work that is within the limits but differs in a bit is `inexact`, a soft
rejection, because a flipped bit or an updated library can cause it.
Invariants: a worker's figures are compared, never used. A hard reason follows from data that the worker itself signed, so
no other party can cause it. `context` comes first, and its rejections are soft, so that a file that reaches another
check was signed for exactly this assignment. `derived_tasks` rejects rows that were made for another task, so also a
worker's own earlier rollouts: their seeds follow from another nonce.
docs/trust.md lists the lies that are not caught.
Papers: TOPLOC (arXiv 2501.16007); INTELLECT-2 (arXiv 2505.07291), section on validators.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from shoal import toploc
from shoal.config import Config
from shoal.config.sections import ValidatorSection
from shoal.evidence import ALPHA, within
from shoal.model.turns import model_spans, model_tokens
from shoal.protocol.messages import Reason, Replay
from shoal.sandbox import Budget, interpreter
from shoal.store.columns import PROOF_BYTES, PROOF_CHUNK_TOKENS
from shoal.store.rollouts import prompts_digest
from shoal.tasks.environments import Conversation
from shoal.validator.case import Case, Finding, Outcome, Prefill
from shoal.validator.prefill import ALTERNATIVES, submission_evidence
from shoal.validator.rounding import allowed_mismatches, chance_mismatches, of_margins, of_proofs

EOS_PROBABILITY = 0.1  # an end token that its seed does not yield must be more probable than this (INTELLECT-2)
# Numerics can move a few tokens beyond `sampling_margin`. A submission may contain up to this many end tokens beyond
# the margin, and as many special tokens; a small one only as many as `rounding.chance_mismatches`.
OUTLIERS = 2
DISTRIBUTION_EVIDENCE = 16.0  # limit in nats. Honest work exceeds x nats with probability at most e^-x


@dataclass(frozen=True)
class Rules:
    """What the checks know besides the case: the run's config and the loaded version."""

    config: Config
    run: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    conversation: Conversation
    special_ids: frozenset[int]  # tokens that only chat templates use, except the end tokens
    vocabulary: int  # ids below this have an embedding
    budget: Budget = field(default_factory=Budget)  # time limit of environments and graders

    def limits(self, case: Case) -> ValidatorSection:
        """Return the limits for the engine and device in the signed header.

        A worker that names another engine gets no more tolerance than workers that use that engine.
        """
        return self.config.validator.of(case.header.engine)


Check = Callable[[Rules, Case], Outcome]
PASSED = Outcome()


def rejected(reason: Reason, detail: str, evidence: dict[str, float] | None = None) -> Outcome:
    return Outcome(Finding(reason, detail), evidence or {})


def context(rules: Rules, case: Case) -> Outcome:
    """Did this worker sign the file for this assignment?

    Soft: anyone who can change the coordinator's answers, or restore the coordinator to an older state, can cause this
    rejection. A file that passes was signed for exactly this assignment, so its worker is responsible for its content.
    """
    header, given = case.header, case.assignment
    if header.signer != case.worker or header.worker != case.worker:
        return rejected(Reason.SIGNATURE, f"signed by {header.signer[:16]}, submitted by {case.worker[:16]}")
    if header.run == rules.run and header.submission != given.number:
        return rejected(Reason.CONTEXT, f"made for task {header.submission}, submitted for task {given.number}")
    claimed = (header.run, header.step, header.policy_version, header.policy_digest, header.nonce, header.groups)
    if claimed != (rules.run, given.step, given.policy_version, given.policy_digest, given.nonce, given.groups):
        return rejected(
            Reason.CONTEXT, f"its header has another run, step, version, digest, nonce or groups: {claimed}"
        )
    return PASSED


def derived_tasks(rules: Rules, case: Case) -> Outcome:
    """Do the targets, seeds and groups follow from the assignment? (`prompts` checks the tasks.)"""
    expected = [(group, plan.target_length, seed) for group, plan in enumerate(case.plans) for seed in plan.seeds]
    claimed = [(row.group, row.target_length, row.seed) for row in case.rows]
    if claimed == expected:
        return PASSED
    if len(claimed) != len(expected):
        return rejected(Reason.TASKS, f"{len(claimed)} rollouts instead of {len(expected)}")
    at = next(i for i, pair in enumerate(zip(claimed, expected, strict=True)) if pair[0] != pair[1])
    return rejected(Reason.TASKS, f"rollout {at} has (group, target, seed) {claimed[at]}, expected {expected[at]}")


def prompts(rules: Rules, case: Case) -> Outcome:
    """Did the worker sign the prompts of these tasks?

    Soft, because another release of a tokenizer may encode them differently.
    """
    if case.header.prompts != prompts_digest(case.prompts):
        return rejected(Reason.CONTEXT, "the signed prompts are not those of its tasks")
    return PASSED


def bounds(rules: Rules, case: Case) -> Outcome:
    """Are lengths, token ids and logprobs within the limits of the model and the run?"""
    vocabulary, settings = rules.vocabulary, rules.config.sampling
    for number, row in enumerate(case.rows):
        n = len(row.tokens)
        if not 0 <= row.group < len(case.plans):
            return rejected(Reason.BOUNDS, f"rollout {number}: there is no group {row.group}")
        if not 1 <= n <= settings.max_tokens:
            return rejected(Reason.BOUNDS, f"rollout {number}: {n} tokens")
        if len(row.turns) > 2 * (settings.max_turns - 1):
            return rejected(Reason.BOUNDS, f"rollout {number}: {len(row.turns) // 2 + 1} turns of the model")
        sampled = model_tokens(row.turns, n)
        if len(row.logprobs) != sampled:
            return rejected(Reason.BOUNDS, f"rollout {number}: {sampled} sampled tokens, {len(row.logprobs)} logprobs")
        if len(row.proofs) != -(-sampled // PROOF_CHUNK_TOKENS):
            return rejected(Reason.BOUNDS, f"rollout {number}: {len(row.proofs)} proofs for {sampled} sampled tokens")
        if not all(0 <= token < vocabulary for token in row.tokens):
            return rejected(Reason.BOUNDS, f"rollout {number}: a token id outside 0..{vocabulary - 1}")
        if not all(-1e4 < logprob <= 1e-3 for logprob in row.logprobs):
            return rejected(Reason.BOUNDS, f"rollout {number}: a logprob that is not the logarithm of a probability")
    return PASSED


def endings(rules: Rules, case: Case) -> Outcome:
    """Does every turn stop at its first end token? (The last turn may stop at the length limit.)"""
    for number, row in enumerate(case.rows):
        n = len(row.tokens)
        for start, end in model_spans(row.turns, n):
            if any(token in rules.eos_ids for token in row.tokens[start : end - 1]):
                return rejected(Reason.TERMINATION, f"rollout {number} continues after an end token")
            if row.tokens[end - 1] not in rules.eos_ids and end != rules.config.sampling.max_tokens:
                return rejected(Reason.TERMINATION, f"rollout {number} stops after {end} tokens without an end token")
    return PASSED


def commitments(rules: Rules, case: Case) -> Outcome:
    """Is every proof well formed?"""
    for number, row in enumerate(case.rows):
        try:
            toploc.parse(row.proofs, top_k=PROOF_BYTES // 2 - 1, sequence=number)
        except toploc.ProofError as error:
            return rejected(Reason.PROOF, f"malformed proof: {error}")
    return PASSED


def computed_fault(prefill: Prefill) -> str:
    """Describe the first figure of a prefill that is not finite, or is a margin below 0; "" if there is none."""
    for name in ("hidden_NH", "logprobs_N", "margins_N", "evidence_NA"):
        tensor, lowest = getattr(prefill, name), 0.0 if name == "margins_N" else -math.inf
        if len(wrong := tensor[~(torch.isfinite(tensor) & (tensor >= lowest))]):
            return f"{name} contains {float(wrong[0])}: the version or this machine is broken"
    return ""


def proof(rules: Rules, case: Case) -> Outcome:
    """Do the TOPLOC proofs match the hidden states that the claimed weights give?

    First it checks that this machine computes finite figures, on which all later checks rest.
    """
    prefill = case.computed()
    if fault := computed_fault(prefill):  # of no consequence for the worker, which cannot cause it
        return rejected(Reason.UNREPEATABLE, f"nothing is known about this submission, because here {fault}")
    hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
    try:
        results = toploc.verify_many(hiddens, [row.proofs for row in case.rows], chunk_tokens=PROOF_CHUNK_TOKENS)
    except toploc.ProofError as error:
        return rejected(Reason.PROOF, f"malformed proof: {error}")
    chunks = [chunk for rollout in results for chunk in rollout]
    errors = of_proofs(chunks, rules.limits(case))
    evidence = {
        "proof_exponent_max": errors.largest,
        "proof_exponent_mean": errors.exponents,
        "proof_mantissa_mean": errors.mantissas,
        "proofs_failed": errors.failed,
    }
    if errors.explained:
        return Outcome(None, evidence)
    return rejected(
        Reason.PROOF,
        f"not the hidden states of version {case.assignment.policy_version}: {errors.failed} of {len(chunks)} proofs "
        f"fail, {errors.exponents:.1f} exponents differ in a proof on average",
        evidence,
    )


def sampling(rules: Rules, case: Case) -> Outcome:
    """Does every token follow from its seed? (A few may differ within numerical error.)"""
    margins_N, limits = case.computed().margins_N, rules.limits(case)
    margins = of_margins(margins_N, limits, allowed_mismatches(len(margins_N), limits))
    evidence = {"mismatch_frac": margins.beyond, "margin_mean": margins.mean, "margin_max": margins.largest}
    if margins.explained:
        return Outcome(None, evidence)
    return rejected(
        Reason.SAMPLING,
        f"{margins.beyond:.1%} of the tokens are not what their seeds yield; the mean margin is {margins.mean:.3f} nats",
        evidence,
    )


def logprobs(rules: Rules, case: Case) -> Outcome:
    """Do the claimed logprobs match, on average, those that the claimed weights give?"""
    claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs])
    error = float((claimed_N - case.computed().logprobs_N).abs().mean())
    evidence = {"logprob_error_mean": error}
    if within(error, rules.limits(case).logprob_error_mean):
        return Outcome(None, evidence)
    return rejected(Reason.LOGPROBS, f"claimed logprobs are off by {error:.3f} nats on average", evidence)


def termination(rules: Rules, case: Case) -> Outcome:
    """Is every end token likely, or does it follow from its seed? (A few exceptions are allowed.)"""
    prefill, limits = case.computed(), rules.limits(case)
    likely_N = prefill.logprobs_N.exp() > EOS_PROBABILITY
    yielded_N = within(prefill.margins_N, limits.sampling_margin)
    rollouts = [number for number, _ in _among(case, rules.eos_ids, ~(likely_N | yielded_N))]
    if len(rollouts) > _outliers(case):
        return rejected(
            Reason.TERMINATION,
            f"{len(rollouts)} unlikely end tokens that their seeds do not yield, the first in rollout {rollouts[0]}",
        )
    return PASSED


def special_tokens(rules: Rules, case: Case) -> Outcome:
    """Do special tokens, which only chat templates use, follow from their seeds? (A few exceptions are allowed.)"""
    yielded_N = within(case.computed().margins_N, rules.limits(case).sampling_margin)
    tokens = [token for _, token in _among(case, rules.special_ids, ~yielded_N)]
    if len(tokens) > _outliers(case):
        return rejected(
            Reason.SPECIAL_TOKENS,
            f"contains {len(tokens)} special tokens that their seeds do not yield; the first is {tokens[0]}",
        )
    return PASSED


def _outliers(case: Case) -> int:
    return min(OUTLIERS, chance_mismatches(len(case.computed().margins_N), ALPHA))


def _among(case: Case, ids: Collection[int], odd_N: torch.Tensor) -> list[tuple[int, int]]:
    """Return (rollout number, token) for each token that is one of these ids and is marked in `odd_N`."""
    pairs = zip(case.sampled(), odd_N.tolist(), strict=True)
    return [(number, token) for (number, token), odd in pairs if odd and token in ids]


def distribution(rules: Rules, case: Case) -> Outcome:
    """Are the tokens about as likely as honest samples at the configured temperature?

    This check does not use the seeds.
    """
    evidence_NA = case.computed().evidence_NA
    nats = submission_evidence(evidence_NA)
    evidence = {"distribution_evidence": nats}
    if within(math.exp(min(nats, 700.0)), math.exp(DISTRIBUTION_EVIDENCE)):
        return Outcome(None, evidence)
    kind = ALTERNATIVES[int(evidence_NA.sum(0).argmax())]
    return rejected(
        Reason.DISTRIBUTION,
        f"the tokens are e^{nats:.0f} times more likely under {kind} sampling than at temperature "
        f"{rules.config.sampling.temperature:g}",
        evidence,
    )


def exact_tokens(rules: Rules, case: Case) -> Outcome:
    """Does every token follow from its seed, with a margin of exactly 0?"""
    margins_N = case.computed().margins_N
    return _unless_equal(
        case,
        "tokens",
        margins_N != 0,
        lambda n: (
            f"its score is {float(margins_N[n]):.3g} nats below that of the token that the seed yields; "
            "from a machine of this class, the two would be equal"
        ),
    )


def exact_logprobs(rules: Rules, case: Case) -> Outcome:
    """Is every logprob equal to the recomputed one, bit for bit?"""
    claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs], dtype=torch.float32)
    own_N = case.computed().logprobs_N.to(torch.float32)
    return _unless_equal(
        case,
        "logprobs",
        claimed_N != own_N,
        lambda n: f"the claimed one is {float(claimed_N[n])!r}, the recomputed one {float(own_N[n])!r}",
    )


def exact_proofs(rules: Rules, case: Case) -> Outcome:
    """Is every proof equal to the one that the recomputed hidden states give, byte for byte?"""
    prefill = case.computed()
    own = toploc.build_many(list(torch.split(prefill.hidden_NH, prefill.lengths)), chunk_tokens=PROOF_CHUNK_TOKENS)
    pairs = [
        (number, chunk, claimed == proof)
        for number, (row, proofs) in enumerate(zip(case.rows, own, strict=True))
        for chunk, (claimed, proof) in enumerate(zip_longest(row.proofs, proofs))
    ]
    wrong = [(number, chunk) for number, chunk, equal in pairs if not equal]
    if not wrong:
        return PASSED
    number, chunk = wrong[0]
    detail = f"{len(wrong)} of {len(pairs)} proofs differ; the first is proof {chunk} of rollout {number}"
    return rejected(Reason.INEXACT, detail, {"inexact_proofs": float(len(wrong))})


def _unless_equal(case: Case, what: str, differing_N: torch.Tensor, how: Callable[[int], str]) -> Outcome:
    """Reject if a token is marked in `differing_N`. `what` names the figures; `how` describes the first difference."""
    if not bool(differing_N.any()):
        return PASSED
    count, first = int(differing_N.sum()), int(differing_N.nonzero()[0])
    position, number = first, 0
    while position >= case.computed().lengths[number]:
        position, number = position - case.computed().lengths[number], number + 1
    detail = (
        f"{count} of {len(differing_N)} {what} differ; at sampled token {position} of rollout {number}, {how(first)}"
    )
    return rejected(Reason.INEXACT, detail, {f"inexact_{what}": float(count)})


def environment(rules: Rules, case: Case) -> Outcome:
    """Are all answers of the environment present, and does the environment give the same answers here?

    The rejection is soft if there is not enough time to query the environment again, or if honest machines may differ.
    """
    doubtful = PASSED
    for number, row in enumerate(case.rows):
        fault = rules.conversation.find_fault(case.tasks[row.group], row.seed, row.tokens, row.turns)
        if rules.conversation.multi_turn and rules.budget.over:
            return rejected(
                Reason.UNREPEATABLE, f"rollout {number}: there is not enough time to run its programs again"
            )
        if fault and fault.lie:
            return rejected(Reason.ENVIRONMENT, f"rollout {number}: {fault.detail}")
        if fault and doubtful is PASSED:
            here = interpreter()
            elsewhere = f"but those tokens may be right on another machine (this one has {here})"
            detail = f"rollout {number}: {fault.detail}, {elsewhere}"
            doubtful = rejected(Reason.UNREPEATABLE, detail)
    return doubtful


FILE: list[Check] = [context, derived_tasks, prompts, bounds, endings, commitments]
EXPENSIVE: list[Check] = [proof, sampling, logprobs, termination, special_tokens, distribution]
EXACT: list[Check] = [exact_tokens, exact_logprobs, exact_proofs]
ANSWERS: list[Check] = [environment]
ALL: list[Check] = [*FILE, *EXPENSIVE, *ANSWERS]


def run(checks: Sequence[Check], rules: Rules, case: Case) -> Outcome:
    """Run checks in order up to the first finding. Return this finding and the evidence of all checks that ran."""
    evidence: dict[str, float] = {}
    for check in checks:
        outcome = check(rules, case)
        evidence |= outcome.evidence
        if outcome.finding:
            return Outcome(outcome.finding, evidence)
    return Outcome(None, evidence)


def replay(case: Case) -> Replay:
    """Return the result of an exact replay."""
    margins_N = case.computed().margins_N
    return Replay(tokens=len(margins_N), mismatched=int((margins_N != 0).sum()))
