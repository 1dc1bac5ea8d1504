"""The list of lies: one small function for each, from cheap to dear.

A check takes a `Case` and returns a `Finding` (what is wrong) or None. Its docstring is the question it asks, which
`shoal verify` prints. `CHEAP` ones read the file; `DEAR` ones read what one prefill of the claimed version gave.

Invariant: a worker's figures are compared, never used. Called by `judge`. docs/trust.md says what is not caught, and why.
Papers: TOPLOC (arXiv 2501.16007); INTELLECT-2 (arXiv 2505.07291), section on validators.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shoal import toploc
from shoal.config import Config
from shoal.protocol.messages import Reason
from shoal.store.rollouts import PROOF_CHUNK_TOKENS, prompts_digest
from shoal.tasks import TaskSet
from shoal.tasks.prompt import completion_text, reward
from shoal.validator.case import Case, Finding
from shoal.validator.distribution import ALTERNATIVES, submission_evidence

REWARD_TOLERANCE = 1e-4  # absolute, and relative beyond 1: a reward crosses the wire as float32
FAR = 4.0  # times `sampling_margin`: as far off as no numerics bring a token
WORST_MANTISSA = 127.0  # stands for a proof without one agreeing exponent, whose mantissa error is infinite


@dataclass(frozen=True)
class Rules:
    """What holds for every submission of a run."""

    config: Config
    run: str
    tasks: TaskSet
    tokenizer: Any
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]  # tokens that only chat templates use; ends are not among them
    vocabulary: int  # ids below this have an embedding


Check = Callable[[Rules, Case], Finding | None]


def context(rules: Rules, case: Case) -> Finding | None:
    """Is it this worker's file, for this task, of this run, step and version, on these prompts?"""
    header, asked = case.header, case.assignment
    if header.signer != case.worker or header.worker != case.worker:
        return Finding(Reason.SIGNATURE, f"signed by {header.signer[:16]}, handed in by {case.worker[:16]}")
    if header.run == rules.run and header.submission != asked.number:
        return Finding(Reason.REPLAYED, f"made for task {header.submission}, handed in for task {asked.number}")
    said = (header.run, header.step, header.policy_version, header.policy_digest)
    if said != (rules.run, asked.step, asked.policy_version, asked.policy_digest):
        return Finding(Reason.CONTEXT, f"says run, step, version, digest {said}")
    if header.prompts != prompts_digest(case.prompts):
        return Finding(Reason.CONTEXT, "made for other prompts than its tasks have")
    return None


def replayed(rules: Rules, case: Case) -> Finding | None:
    """Were these very rollouts handed in before?"""
    if case.content_owner in (None, case.assignment.id):
        return None
    return Finding(Reason.REPLAYED, f"the same rollouts as {case.content_owner}")


def derived_tasks(rules: Rules, case: Case) -> Finding | None:
    """Are tasks, targets, seeds and groups those that follow from the assignment?"""
    expected = [
        (group, case.tasks[group].id, plan.target_length, seed)
        for group, plan in enumerate(case.plans)
        for seed in plan.seeds
    ]
    found = [(row.group, row.task, row.target_length, row.seed) for row in case.rows]
    if found == expected:
        return None
    if len(found) != len(expected):
        return Finding(Reason.TASKS, f"{len(found)} rollouts, {len(expected)} were asked for")
    at = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    return Finding(Reason.TASKS, f"rollout {at} is of (group, task, target, seed) {found[at]}, not {expected[at]}")


def bounds(rules: Rules, case: Case) -> Finding | None:
    """Are lengths, token ids and figures within what the model and the run allow?"""
    vocabulary, longest = rules.vocabulary, rules.config.sampling.max_tokens
    for number, row in enumerate(case.rows):
        n = len(row.tokens)
        if not 1 <= n <= longest or len(row.logprobs) != n:
            return Finding(Reason.BOUNDS, f"rollout {number}: {n} tokens, {len(row.logprobs)} logprobs")
        if len(row.proofs) != -(-n // PROOF_CHUNK_TOKENS):
            return Finding(Reason.BOUNDS, f"rollout {number}: {len(row.proofs)} proofs for {n} tokens")
        if not all(0 <= token < vocabulary for token in row.tokens):
            return Finding(Reason.BOUNDS, f"rollout {number}: a token id beyond {vocabulary}")
        if not all(-1e4 < logprob <= 1e-3 for logprob in row.logprobs):
            return Finding(Reason.BOUNDS, f"rollout {number}: a logprob that is none")
    return None


def endings(rules: Rules, case: Case) -> Finding | None:
    """Does every completion run to an end token or to the length limit, and no further?"""
    for number, row in enumerate(case.rows):
        if any(token in rules.eos_ids for token in row.tokens[:-1]):
            return Finding(Reason.TERMINATION, f"rollout {number} goes on after an end token")
        n = len(row.tokens)
        if row.tokens[-1] not in rules.eos_ids and n != rules.config.sampling.max_tokens:
            return Finding(Reason.TERMINATION, f"rollout {number} stops after {n} tokens without an end token")
    return None


def rewards(rules: Rules, case: Case) -> Finding | None:
    """Is the claimed reward what the grader gives? Every reward is recomputed here."""
    case.rewards = []
    for row in case.rows:
        task = case.tasks[row.group]
        grade = rules.tasks.grade(task, completion_text(rules.tokenizer, row.tokens))
        case.rewards.append(reward(grade, len(row.tokens), row.target_length, rules.config.tasks.length_penalty))
    wrong = [
        i
        for i, (row, own) in enumerate(zip(case.rows, case.rewards, strict=True))
        if not abs(row.reward - own) <= REWARD_TOLERANCE * max(1.0, abs(own))
    ]
    if not wrong:
        return None
    case.evidence |= {"wrong": len(wrong), "rollouts": len(case.rows)}
    first = wrong[0]
    return Finding(
        Reason.REWARD,
        f"rollout {first} claims {case.rows[first].reward:g}, the grader gives {case.rewards[first]:g}",
    )


def proof(rules: Rules, case: Case) -> Finding | None:
    """TOPLOC: are the hidden states that were committed to those of the claimed weights?"""
    prefill = case.computed()
    hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
    try:
        results = toploc.verify_many(hiddens, [row.proofs for row in case.rows], chunk_tokens=PROOF_CHUNK_TOKENS)
    except toploc.ProofError as error:
        return Finding(Reason.PROOF, f"malformed proof: {error}")
    chunks = [chunk for rollout in results for chunk in rollout]
    failed = [chunk for chunk in chunks if not toploc.BFLOAT16.passes(chunk)]
    limits = rules.config.validator
    exponents = sum(chunk.exponent_mismatches for chunk in chunks) / len(chunks)
    mantissas = sum(min(chunk.mantissa_error_mean, WORST_MANTISSA) for chunk in chunks) / len(chunks)
    case.evidence |= {
        "proof_exponent_max": max(chunk.exponent_mismatches for chunk in chunks),
        "proof_exponent_mean": exponents,
        "proof_mantissa_mean": mantissas,
        "proofs_failed": len(failed),
    }
    if not failed and exponents <= limits.proof_exponent_mean and mantissas <= limits.proof_mantissa_mean:
        return None
    return Finding(
        Reason.PROOF,
        f"not the hidden states of version {case.assignment.policy_version}: {len(failed)} of {len(chunks)} proofs "
        f"fail, {exponents:.1f} exponents differ in a proof on average",
    )


def sampling(rules: Rules, case: Case) -> Finding | None:
    """Is every token the one its seed yields, but for a few within numerical reach?"""
    limits = rules.config.validator
    margins_N = case.computed().margins_N
    beyond = int((margins_N > limits.sampling_margin).sum())
    far = int((margins_N > FAR * limits.sampling_margin).sum())
    share = beyond / len(margins_N)
    mean = float(margins_N.clamp(max=1.0).mean())
    case.evidence |= {
        "mismatch_frac": share,
        "margin_mean": mean,
        "margin_max": float(margins_N.max()),
    }
    allowed = limits.sampling_mismatches + limits.sampling_mismatch_frac * len(margins_N)
    if far == 0 and beyond <= allowed and mean <= limits.sampling_margin_mean:
        return None
    return Finding(
        Reason.SAMPLING, f"{share:.1%} of the tokens are far from what their seeds yield; by {mean:.3f} nats on average"
    )


def logprobs(rules: Rules, case: Case) -> Finding | None:
    """Are the claimed logprobs, on the whole, those of the claimed weights?"""
    claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs])
    error = float((claimed_N - case.computed().logprobs_N).abs().mean())
    case.evidence |= {"logprob_error_mean": error}
    if error <= rules.config.validator.logprob_error_mean:
        return None
    return Finding(Reason.LOGPROBS, f"claimed logprobs are off by {error:.3f} nats on average")


def termination(rules: Rules, case: Case) -> Finding | None:
    """Was every end token likely, or the one that its seed yields?"""
    prefill, limits = case.computed(), rules.config.validator
    last_R = torch.tensor(prefill.lengths).cumsum(0) - 1
    likely_R = prefill.logprobs_N[last_R].exp() > limits.eos_probability
    yielded_R = prefill.margins_N[last_R] <= limits.sampling_margin
    for number, fine in enumerate((likely_R | yielded_R).tolist()):
        if not fine and case.rows[number].tokens[-1] in rules.eos_ids:
            return Finding(
                Reason.TERMINATION, f"rollout {number} ends with an unlikely end token its seed does not yield"
            )
    return None


def distribution(rules: Rules, case: Case) -> Finding | None:
    """Are the tokens as likely, on the whole, as samples at the stated temperature are? (Needs no seeds.)"""
    evidence_NA = case.computed().evidence_NA
    found = submission_evidence(evidence_NA)
    case.evidence |= {"distribution_evidence": found}
    if found <= rules.config.validator.distribution_evidence:
        return None
    kind = ALTERNATIVES[int(evidence_NA.sum(0).argmax())]
    return Finding(
        Reason.DISTRIBUTION,
        f"e^{found:.0f} times likelier under {kind} sampling than at temperature {rules.config.sampling.temperature:g}",
    )


def special_tokens(rules: Rules, case: Case) -> Finding | None:
    """Is every token that only chat templates use one that its seed yields?"""
    tokens_N = [token for row in case.rows for token in row.tokens]
    for token, margin in zip(tokens_N, case.computed().margins_N.tolist(), strict=True):
        if token in rules.special_ids and margin > rules.config.validator.sampling_margin:
            return Finding(Reason.SPECIAL_TOKENS, f"holds special token {token}, which its seed does not yield")
    return None


CHEAP: list[Check] = [context, replayed, derived_tasks, bounds, endings, rewards]
DEAR: list[Check] = [proof, sampling, logprobs, termination, special_tokens, distribution]


def first(checks: list[Check], rules: Rules, case: Case) -> Finding | None:
    """Run checks in order; the first finding ends it."""
    return next((finding for check in checks if (finding := check(rules, case))), None)
