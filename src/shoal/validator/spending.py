"""What a submission used of the tolerance that its checks leave, for the tests over all of a worker's submissions.

Numerics move a token only where the two best scores nearly tie. Given the worker's tokens, the noise is still random there:
the gap to the second score falls below x with probability about x (1 - P(token)), independently from token to token and of
everything that follows from the tokens, such as the reward. So honest mismatches are spread over the completions by their
exposure, the sum of 1 - P(token), whatever the rewards are. A worker that chooses among near ties for the reward cannot do
that: its mismatches are in the completions that became better, or worse.

Whether the other choice would have led to another reward takes a generation: `changed`, if `evidence.regenerated` asks for
it. A rollout with a token that is not its seed's is a near tie that fell the other way. For an honest worker numerics
decided, which know no reward: what the seed yields here is as often better as it is worse. A worker that chose has taken
the better one each time (or the worse one). So each such rollout is evidence by itself, however seldom there is one and
however small the margin. Decoys do not help: rollouts with equal rewards are not counted. Nor are those whose grade came
near a limit: a busy machine, not a token, may have changed it.

Invariants: it reads the prefill and the validator's own rewards only; which rollouts are generated again is drawn after the
upload, from the system's randomness. Left out: completions of several turns are not generated again.
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

STAKE = 0.5  # of the capital that an allocation bet can lose on one token
MOST = 1e6  # nats; a message holds no more


def spent(case: Case, config: Config, evidence: dict[str, float]) -> ToleranceSpent:
    """Of a case that was prefilled whole, graded and accepted; `evidence`: what its checks measured."""
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
    means = [sum(of_group) / len(of_group) for of_group in values]

    def within(sign: int) -> float:
        """The bet inside of each group, over all groups: they are independent."""
        return sum(
            allocation(count, exposed, [sign * value for value in of_group], REWARD_TILT, STAKE)
            for count, exposed, of_group in zip(counts, exposures, values, strict=True)
        )

    def between(sign: int) -> float:
        totals, exposed = [sum(count) for count in counts], [sum(one) for one in exposures]
        return allocation(totals, exposed, [sign * mean for mean in means], TASK_TILT, STAKE)

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


def changed(judge: Judge, case: Case, most: int) -> tuple[int, int]:
    """Of `most` rollouts with a missed token: how many are better than what their seeds yield here, and how many worse."""
    margins = torch.split(case.computed().margins_N, case.computed().lengths)
    missed = [
        n
        for n, row in enumerate(case.rows)
        if not row.turns and case.grades[n].repeatable and bool((margins[n] > 0).any())
    ]
    drawn = sorted(judge.choose(missed, min(most, len(missed))))
    if not drawn:
        return 0, 0
    rows = [case.rows[n] for n in drawn]
    own = [replace(row, tokens=one.tokens) for row, one in zip(rows, _own(judge, case, drawn), strict=True)]
    again = judge.grade(replace(case, rows=own))
    gains = [
        case.rewards[n] - reward
        for n, reward, grade in zip(drawn, again.rewards, again.grades, strict=True)
        if grade.repeatable
    ]
    return sum(gain > EPSILON for gain in gains), sum(gain < -EPSILON for gain in gains)


def _own(judge: Judge, case: Case, drawn: list[int]) -> list[Completion]:
    """What the seeds of these rollouts yield on this machine."""
    assert judge.rules is not None, "what was prefilled has rules"
    section = judge.config.sampling
    engine = TorchEngine(judge.dtype, judge.config.model.device, numerics.of(judge.model))
    engine.model = judge.model
    groups = engine.generate(
        [case.prompts[case.rows[n].group] for n in drawn],
        [[case.rows[n].seed] for n in drawn],
        Sampling(section.temperature, section.max_tokens, judge.rules.eos_ids),
    )
    return [one for [one] in groups]


def _per_rollout(values_N: Tensor, lengths: list[int]) -> list[float]:
    return [float(part.sum()) for part in torch.split(values_N, lengths)]


def _bounded(nats: float) -> float:
    return min(max(nats, -MOST), MOST)
