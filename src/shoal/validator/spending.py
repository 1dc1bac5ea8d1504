"""What a submission used of the tolerance that its checks leave, for the tests over all of a worker's submissions.

Numerics move a token only where the two best scores nearly tie. Given the worker's tokens, the noise is still random there:
the gap to the second score falls below x with probability about x (1 - P(token)), independently from token to token and of
everything that follows from the tokens, such as the reward. So honest mismatches are spread over the completions by their
exposure, the sum of 1 - P(token), whatever the rewards are. A worker that chooses among near ties for the reward cannot do
that: its mismatches are in the completions that became better, or worse.

Invariant: it reads the prefill and the validator's own rewards only. Called by the validator's service for accepted work.
Left out: whether the other choice would have led to another reward, which takes a generation (`choices`).
"""

import torch
from torch import Tensor

from shoal.config import Config
from shoal.evidence import allocation
from shoal.model.turns import model_positions
from shoal.protocol.messages import BEYOND, Spent
from shoal.protocol.messages.checking import MOST_MISSED
from shoal.validator.case import Case

STAKE = 0.5  # of the capital that an allocation bet can lose on one token
MOST = 1e6  # nats; a message holds no more


def spent(case: Case, config: Config, evidence: dict[str, float]) -> Spent:
    """Of a case that was prefilled whole, graded and accepted; `evidence`: what its checks measured."""
    prefill, rewards = case.computed(), case.graded()
    margins_N = prefill.margins_N
    exposure_N = (1.0 - prefill.logprobs_N.double().exp()).clamp(min=0.0)
    missed_R = _per_rollout((margins_N > 0).double(), prefill.lengths)
    exposure_R = _per_rollout(exposure_N, prefill.lengths)
    size = case.group_size
    groups = [slice(start, start + size) for start in range(0, len(rewards), size)]
    counts = [[int(count) for count in missed_R[group]] for group in groups]
    exposures = [exposure_R[group] for group in groups]
    values = [rewards[group] for group in groups]
    means = [sum(of_group) / len(of_group) for of_group in values]

    def within(sign: int) -> float:
        """The bet inside of each group, over all groups: they are independent."""
        return sum(
            allocation(count, exposed, [sign * value for value in of_group], config.evidence.reward_tilt, STAKE)
            for count, exposed, of_group in zip(counts, exposures, values, strict=True)
        )

    def between(sign: int) -> float:
        totals, exposed = [sum(count) for count in counts], [sum(one) for one in exposures]
        return allocation(totals, exposed, [sign * mean for mean in means], config.evidence.task_tilt, STAKE)

    limit = config.validator.of(case.header.engine).sampling_margin
    first, second, third, fourth = (int((margins_N > part * limit).sum()) for part in BEYOND)
    return Spent(
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


def missed(case: Case) -> list[tuple[int, int, float]]:
    """The tokens that miss those their seeds yield, the farthest first: rollout, position in it, nats. For people to see."""
    margins = torch.split(case.computed().margins_N, case.computed().lengths)
    found = [
        (number, position, float(f"{min(margin, MOST):.4g}"))
        for number, (row, own) in enumerate(zip(case.rows, margins, strict=True))
        for position, margin in zip(model_positions(row.turns, len(row.tokens)), own.tolist(), strict=True)
        if margin > 0
    ]
    return sorted(found, key=lambda one: -one[2])[:MOST_MISSED]


def _per_rollout(values_N: Tensor, lengths: list[int]) -> list[float]:
    return [float(part.sum()) for part in torch.split(values_N, lengths)]


def _bounded(nats: float) -> float:
    return min(max(nats, -MOST), MOST)
