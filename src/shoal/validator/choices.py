"""Whether a worker's near ties changed its rewards: some of its rollouts generated again, from their seeds.

A rollout with a token that is not its seed's is a near tie that fell the other way. For an honest worker numerics decided,
which know no reward: what the seed yields here is as often better as it is worse. A worker that chose has taken the better
one each time (or the worse one). So each such rollout is evidence by itself, however seldom there is one and however small
the margin. Decoys do not help: rollouts with equal rewards are not counted. Nor are those whose grade came near a limit: a
busy machine, not a token, may have changed it.

Invariant: which rollouts are generated again is drawn after the upload, from the system's randomness.
Called by the validator's service, if `evidence.regenerated` says so: a generation costs more than a prefill. Left out:
completions of several turns.
"""

from dataclasses import replace

import torch

from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model import numerics
from shoal.tasks.budget import EPSILON
from shoal.validator.case import Case
from shoal.validator.judge import Judge


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
        case.graded()[n] - reward
        for n, reward, grade in zip(drawn, again.graded(), again.grades, strict=True)
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
        Sampling(section.temperature, section.max_tokens, judge.rules.eos_ids, section.noise),
    )
    return [one for [one] in groups]
