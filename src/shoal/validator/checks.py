"""The list of lies: one small function for each, from cheap to dear.

A check takes a `Case` and returns a `Finding` (what is wrong) or None. `CHECKS` holds them in the order they run; those
after `compute` share one prefill of the claimed version, the prompt computed once per group.

Invariant: a worker's figures are compared, never used. What the learner gets is what `Case` recomputed.
Called by the validator's service. Left out: sampled checking, the token-probability shape test, calibrated thresholds.
Papers: TOPLOC (arXiv 2501.16007); INTELLECT-2 (arXiv 2505.07291), section on validators.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal import toploc
from shoal.config import Config
from shoal.messages import Assignment, Reason
from shoal.model.sampling import replay_margins, token_logprobs
from shoal.model.tree import Tree, assign_rows, forward_hidden, pack, split
from shoal.store.rollouts import Header, Rollout
from shoal.tasks import TaskSet
from shoal.tasks.derive import GroupPlan
from shoal.tasks.prompt import completion_text, prompt_tokens, reward

REWARD_TOLERANCE = 1e-4  # absolute, and relative beyond 1: a reward crosses the wire as float32
VOCAB_CHUNK = 256  # tokens whose logits are in memory together
PROOF_CHUNK_TOKENS = 32
WORST_MANTISSA = 127.0  # stands for a proof without one agreeing exponent, whose mantissa error is infinite


@dataclass(frozen=True)
class Finding:
    """Why a submission is rejected."""

    reason: Reason
    detail: str


@dataclass
class Case:
    """One submission before the checks: what was asked, what was handed in, and what is recomputed on the way."""

    config: Config
    run: str
    worker: str
    assignment: Assignment
    header: Header
    rows: list[Rollout]
    plans: list[GroupPlan]
    tasks: TaskSet
    tokenizer: Any
    model: Any
    eos_ids: tuple[int, ...]
    content_owner: str | None  # the submission that first held these rollouts, if there is one
    prompts: list[list[int]] = field(default_factory=list)  # one a group
    rewards: list[float] = field(default_factory=list)  # one a rollout, recomputed
    prefill: "Prefill | None" = None
    evidence: dict[str, float] = field(default_factory=dict)  # what the checks measured, accepted or not

    @property
    def group_size(self) -> int:
        return self.config.sampling.group_size


@dataclass(frozen=True)
class Prefill:
    """What the claimed version itself says of every completion token (N in all, rollout by rollout)."""

    hidden_NH: Tensor  # bfloat16
    logprobs_N: Tensor
    margins_N: Tensor  # nats by which the token misses being what its seed yields; 0 where it is
    lengths: list[int]


def context(case: Case) -> Finding | None:
    """Is it this worker's file, for this task, of this run, step and version?"""
    header, asked = case.header, case.assignment
    if header.signer != case.worker or header.worker != case.worker:
        return Finding(Reason.SIGNATURE, f"signed by {header.signer[:16]}, handed in by {case.worker[:16]}")
    if header.run == case.run and header.submission != asked.number:
        return Finding(Reason.REPLAYED, f"made for task {header.submission}, handed in for task {asked.number}")
    said = (header.run, header.step, header.policy_version, header.policy_digest)
    if said != (case.run, asked.step, asked.policy_version, asked.policy_digest):
        return Finding(Reason.CONTEXT, f"says run, step, version, digest {said}")
    return None


def replayed(case: Case) -> Finding | None:
    """Were these very rollouts handed in before?"""
    if case.content_owner in (None, case.assignment.id):
        return None
    return Finding(Reason.REPLAYED, f"the same rollouts as {case.content_owner}")


def derived_tasks(case: Case) -> Finding | None:
    """Are tasks, targets, seeds and groups those that follow from the assignment?"""
    expected = [
        (group, case.tasks.train[plan.task_index].id, plan.target_length, seed)
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


def bounds(case: Case) -> Finding | None:
    """Are lengths, token ids and figures within what the model and the run allow?"""
    vocabulary, longest = case.model.config.vocab_size, case.config.sampling.max_tokens
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


def rewards(case: Case) -> Finding | None:
    """Is the claimed reward what the grader gives? Every reward is recomputed here."""
    case.rewards = []
    for row in case.rows:
        task = case.tasks.train[case.plans[row.group].task_index]
        grade = case.tasks.grade(task, completion_text(case.tokenizer, row.tokens))
        case.rewards.append(reward(grade, len(row.tokens), row.target_length, case.config.tasks.length_penalty))
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


@torch.inference_mode()
def compute(case: Case) -> Finding | None:
    """Not a check: one prefill of the claimed version over all groups, from which the rest is read."""
    case.prompts = [
        prompt_tokens(case.tokenizer, case.config.tasks, case.tasks.train[plan.task_index], plan.target_length)
        for plan in case.plans
    ]
    size = case.group_size
    longest = max(map(len, case.prompts)) + max(len(row.tokens) for row in case.rows)
    row_tokens = max(case.config.validator.row_tokens, longest)  # what is within bounds must be checkable
    device = next(case.model.parameters()).device
    trees = [
        part
        for group, prompt in enumerate(case.prompts)
        for part in split(
            Tree(prompt, [row.tokens for row in case.rows[group * size : (group + 1) * size]]), row_tokens
        )
    ]
    hidden: list[Tensor] = []
    for one_row in assign_rows([tree.n_tokens for tree in trees], row_tokens, in_order=True):
        hidden.append(forward_hidden(case.model, pack([trees[i] for i in one_row], row_tokens).to(device)))
    hidden_NH = torch.cat(hidden)
    tokens_N = torch.tensor([token for row in case.rows for token in row.tokens], device=device)
    seeds = [row.seed for row in case.rows for _ in row.tokens]
    positions = [position for row in case.rows for position in range(len(row.tokens))]
    logprobs, margins = [], []
    temperature = case.config.sampling.temperature
    for start in range(0, len(tokens_N), VOCAB_CHUNK):
        span = slice(start, start + VOCAB_CHUNK)
        logits_CV = case.model.lm_head(hidden_NH[span]).float()
        logprobs.append(token_logprobs(logits_CV / temperature, tokens_N[span]))
        margins.append(replay_margins(logits_CV, tokens_N[span], seeds[span], positions[span], temperature))
    case.prefill = Prefill(
        hidden_NH=hidden_NH.to("cpu", torch.bfloat16),
        logprobs_N=torch.cat(logprobs).cpu(),
        margins_N=torch.cat(margins).cpu(),
        lengths=[len(row.tokens) for row in case.rows],
    )
    return None


def proof(case: Case) -> Finding | None:
    """TOPLOC: are the hidden states that were committed to those of the claimed weights?"""
    prefill = _computed(case)
    hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
    try:
        results = toploc.verify_many(hiddens, [row.proofs for row in case.rows], chunk_tokens=PROOF_CHUNK_TOKENS)
    except toploc.ProofError as error:
        return Finding(Reason.PROOF, f"malformed proof: {error}")
    chunks = [chunk for rollout in results for chunk in rollout]
    failed = [chunk for chunk in chunks if not toploc.BFLOAT16.passes(chunk)]
    limits = case.config.validator
    exponents = sum(chunk.exponent_mismatches for chunk in chunks) / len(chunks)
    mantissas = sum(min(chunk.mantissa_error_mean, WORST_MANTISSA) for chunk in chunks) / len(chunks)
    case.evidence |= {"proof_exponent_mean": exponents, "proof_mantissa_mean": mantissas, "failed": len(failed)}
    if not failed and exponents <= limits.proof_exponent_mean and mantissas <= limits.proof_mantissa_mean:
        return None
    return Finding(
        Reason.PROOF,
        f"not the hidden states of version {case.assignment.policy_version}: {len(failed)} of {len(chunks)} proofs "
        f"fail, {exponents:.1f} exponents differ in a proof on average",
    )


def sampling(case: Case) -> Finding | None:
    """Is every token the one its seed yields, but for a few within numerical reach?"""
    limits = case.config.validator
    margins_N = _computed(case).margins_N
    share = float((margins_N > limits.sampling_margin).float().mean())
    mean = float(margins_N.clamp(max=1.0).mean())
    case.evidence |= {
        "mismatch_frac": share,
        "margin_mean": mean,
        "margin_max": float(margins_N.max()),
    }
    if share <= limits.sampling_mismatch_frac and mean <= limits.sampling_margin_mean:
        return None
    return Finding(
        Reason.SAMPLING, f"{share:.1%} of the tokens are far from what their seeds yield; by {mean:.3f} nats on average"
    )


def logprobs(case: Case) -> Finding | None:
    """Are the claimed logprobs, on the whole, those of the claimed weights?"""
    claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs])
    error = float((claimed_N - _computed(case).logprobs_N).abs().mean())
    case.evidence |= {"logprob_error_mean": error}
    if error <= case.config.validator.logprob_error_mean:
        return None
    return Finding(Reason.LOGPROBS, f"claimed logprobs are off by {error:.3f} nats on average")


def termination(case: Case) -> Finding | None:
    """Does every completion end at the length limit, or with an end token that was likely or that its seed yields?

    An end token of low probability is honest where the seeded draw picked it; the replay margin tells.
    """
    prefill, limits = _computed(case), case.config.validator
    end = 0
    for number, (row, length) in enumerate(zip(case.rows, prefill.lengths, strict=True)):
        end += length
        if any(token in case.eos_ids for token in row.tokens[:-1]):
            return Finding(Reason.TERMINATION, f"rollout {number} goes on after an end token")
        if row.tokens[-1] not in case.eos_ids:
            if length != case.config.sampling.max_tokens:
                return Finding(Reason.TERMINATION, f"rollout {number} stops after {length} tokens without an end token")
            continue
        likely = float(prefill.logprobs_N[end - 1].exp()) > limits.eos_probability
        if not likely and float(prefill.margins_N[end - 1]) > limits.sampling_margin:
            return Finding(
                Reason.TERMINATION, f"rollout {number} ends with an unlikely end token its seed does not yield"
            )
    return None


CHECKS: list[Callable[[Case], Finding | None]] = [
    context,
    replayed,
    derived_tasks,
    bounds,
    rewards,
    compute,
    proof,
    sampling,
    logprobs,
    termination,
]


def examine(case: Case) -> Finding | None:
    """Run the checks in order; the first finding ends it. None: accepted."""
    return next((finding for check in CHECKS if (finding := check(case))), None)


def _computed(case: Case) -> Prefill:
    if case.prefill is None:
        raise RuntimeError("compute() must run before the checks that read the prefill")
    return case.prefill
