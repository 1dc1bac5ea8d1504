"""How much of the checks' tolerance a submission used. `coordinator/trust` sums and tests this for each worker.

A mismatch is a token that differs from the one that its seed yields here. Numerics cause a mismatch only where the two
best scores nearly tie. Given the worker's tokens, the gap between these two scores is still random: it is below x with
probability about x (1 - P(token)). The gaps are independent of each other, and of everything that follows from the
tokens, such as the reward. So honest mismatches are spread over the completions in proportion to the completions'
exposure, which is the sum of 1 - P(token). The rewards have no influence. If a worker decides near ties by the reward,
its mismatches are concentrated in completions that became better, or in those that became worse.

If `evidence.regenerated` is set, `regenerate` generates some rollouts with a mismatch a second time, to see whether the
other token of a near tie leads to another reward. For an honest worker, numerics decided the tie independently of the
reward. So the new rollout is better as often as it is worse. A cheating worker always uploads the better rollout (or
always the worse one). So each rollout whose reward changes is evidence, even if such rollouts are rare and their
margins are small. A cheat gains nothing by adding other mismatches, because rollouts whose reward stays the same are
not counted. A rollout whose grading came near one of its limits is not counted, because a busy machine may have
changed its grade.

Invariants: only the prefill and the validator's own rewards are read. The rollouts to generate again are drawn at
random after the upload, so a worker cannot predict them.
Completions of several turns are not generated again.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shoal.config import Config
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.evidence import REWARD_TILT, TASK_TILT, allocation
from shoal.model import numerics
from shoal.protocol.messages import BEYOND, ToleranceSpent
from shoal.tasks.budget import EPSILON
from shoal.validator.case import Case
from shoal.validator.judge import Judge

STAKE = 0.5  # share of its capital that an allocation bet can lose on one token
MAX_NATS = 1e6  # figures in a message are bounded to this magnitude


def spent(case: Case, config: Config, evidence: dict[str, float]) -> ToleranceSpent:
    """Return the tolerance used by an accepted case that was prefilled whole. `evidence`: the figures of its checks."""
    prefill, rewards = case.computed(), case.rewards
    margins_N = prefill.margins_N
    exposure_N = (1.0 - prefill.logprobs_N.double().exp()).clamp(min=0.0)
    missed_R = _per_rollout((margins_N > 0).double(), prefill.lengths)
    exposure_R = _per_rollout(exposure_N, prefill.lengths)
    size = case.group_size
    groups = [slice(start, start + size) for start in range(0, len(rewards), size)]
    counts = [[int(count) for count in missed_R[group]] for group in groups]
    exposures = [exposure_R[group] for group in groups]
    values = [rewards[group] for group in groups]
    means = [sum(rewards) / len(rewards) for rewards in values]

    def within(sign: int) -> float:
        """Return the log evidence of bets on the completions of each group, summed because groups are independent."""
        return sum(
            allocation(count, exposure, [sign * reward for reward in rewards], REWARD_TILT, STAKE)
            for count, exposure, rewards in zip(counts, exposures, values, strict=True)
        )

    def between(sign: int) -> float:
        """Return the log evidence of a bet on the groups."""
        totals = [sum(count) for count in counts]
        return allocation(totals, list(map(sum, exposures)), [sign * mean for mean in means], TASK_TILT, STAKE)

    limit = config.validator.of(case.header.engine).sampling_margin
    first, second, third, fourth = (int((margins_N > part * limit).sum()) for part in BEYOND)
    return ToleranceSpent(
        exposure=float(exposure_N.sum()),
        beyond=(first, second, third, fourth),
        better=_bounded(within(1)),
        worse=_bounded(within(-1)),
        easier=_bounded(between(1)),
        harder=_bounded(between(-1)),
        proof_exponent_mean=evidence["proof_exponent_mean"],
        proof_mantissa_mean=evidence["proof_mantissa_mean"],
        logprob_error_mean=evidence["logprob_error_mean"],
        distribution=_bounded(evidence["distribution_evidence"]),
    )


def regenerate(judge: Judge, case: Case, limit: int) -> tuple[int, int]:
    """Generate up to `limit` rollouts with a mismatch a second time.

    Return for how many of them the uploaded rollout has a higher reward than the new one, and for how many a lower one.
    """
    margins = torch.split(case.computed().margins_N, case.computed().lengths)
    missed = [
        n
        for n, row in enumerate(case.rows)
        if not row.turns and case.grades[n].repeatable and bool((margins[n] > 0).any())
    ]
    drawn = sorted(judge.choose(missed, min(limit, len(missed))))
    if not drawn:
        return 0, 0
    completions = _generate(judge, case, drawn)
    rows = [replace(case.rows[n], tokens=own.tokens) for n, own in zip(drawn, completions, strict=True)]
    again = judge.grade(replace(case, rows=rows))
    gains = [
        case.rewards[n] - reward
        for n, reward, grade in zip(drawn, again.rewards, again.grades, strict=True)
        if grade.repeatable
    ]
    return sum(gain > EPSILON for gain in gains), sum(gain < -EPSILON for gain in gains)


def _generate(judge: Judge, case: Case, numbers: list[int]) -> list[Completion]:
    """Return the completions that the seeds of these rollouts yield on this machine."""
    section = judge.config.sampling
    engine = TorchEngine(judge.dtype, judge.config.model.device, numerics.of(judge.model))
    engine.model = judge.model
    groups = engine.generate(
        [case.prompts[case.rows[n].group] for n in numbers],
        [[case.rows[n].seed] for n in numbers],
        Sampling(section.temperature, section.max_tokens, judge.rules.eos_ids),
    )
    return [completion for [completion] in groups]


def _per_rollout(values_N: Tensor, lengths: list[int]) -> list[float]:
    return [float(part.sum()) for part in torch.split(values_N, lengths)]


def _bounded(nats: float) -> float:
    return min(max(nats, -MAX_NATS), MAX_NATS)
