"""A verdict: the validator's signed opinion, and figures of each group of an accepted case.

Invariant: the validator has recomputed every figure; none comes from the worker.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.ledger.chain import sign_opinion
from shoal.model.turns import model_tokens
from shoal.protocol.identity import Identity
from shoal.protocol.messages import MILLION, GroupResult, Opinion, Outcomes, Reason, Sample, Verdict
from shoal.tasks import Grade
from shoal.tasks.budget import rewards_differ
from shoal.tasks.prompt import completion_text
from shoal.validator.case import Case

SAMPLE_CHARACTERS = 2_000  # longest prompt or completion in a sample for people


@dataclass(frozen=True)
class Result:
    """What a validator says about one file, unsigned."""

    opinion: Opinion
    detail: str = ""  # of the finding
    evidence: Mapping[str, float] = field(default_factory=dict)
    groups: Sequence[GroupResult] = ()
    accepted: bytes | None = None  # the accepted file

    @property
    def reason(self) -> Reason | None:
        return self.opinion.reason

    def verdict(self, identity: Identity, accepted_hash: str = "") -> Verdict:
        """Return the signed verdict. `accepted_hash`: of the stored accepted file."""
        opinion = self.opinion.model_copy(update={"accepted": accepted_hash})
        return Verdict(
            submission=opinion.submission,
            opinion=sign_opinion(opinion, identity).model_dump_json(),
            detail=self.detail[:2000],
            evidence=dict(self.evidence),
            groups=list(self.groups),
        )


def group_results(case: Case, tokenizer: Any) -> list[GroupResult]:
    """Return each group's recomputed results, with its first completion as a sample for people."""
    size = case.group_size
    results = []
    for start in range(0, len(case.rows), size):
        rewards, grades = case.rewards[start : start + size], case.grades[start : start + size]
        row = case.rows[start]
        sample = Sample(
            task=case.tasks[row.group].id[:200],
            prompt=_cut(completion_text(tokenizer, case.prompts[row.group])),
            completion=_cut(completion_text(tokenizer, row.tokens)),
            reward=rewards[0],
            tokens=model_tokens(row.turns, len(row.tokens)),
        )
        results.append(
            GroupResult(
                task=case.plans[row.group].task_index,
                source=case.tasks[row.group].source,
                target_length=row.target_length,
                reward_mean=sum(rewards) / size,
                score_millionths=sum(round(grade.score * MILLION) for grade in grades),
                outcomes=_outcomes(grades),
                parts=_parts(grades),
                useful=rewards_differ(rewards),
                tokens=sum(model_tokens(row.turns, len(row.tokens)) for row in case.rows[start : start + size]),
                sample=sample,
            )
        )
    return results


def _outcomes(grades: Sequence[Grade]) -> Outcomes:
    counts = Counter(grade.outcome for grade in grades)
    return Outcomes(graded=counts["graded"], wrong_format=counts["wrong_format"], grader_error=counts["grader_error"])


def _parts(grades: Sequence[Grade]) -> dict[str, float]:
    """Return the mean score of each reward, if several are weighted. A reward file is named without its folder."""
    names = dict.fromkeys(name for grade in grades for name in grade.parts)
    means = {name: sum(grade.parts.get(name, 0.0) / len(grades) for grade in grades) for name in names}
    return {name.rpartition("/")[2][-200:]: mean for name, mean in means.items()}


def _cut(text: str) -> str:
    """Shorten a text to SAMPLE_CHARACTERS by cutting its middle."""
    if len(text) <= SAMPLE_CHARACTERS:
        return text
    half = (SAMPLE_CHARACTERS - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
