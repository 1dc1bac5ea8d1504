"""Several rewards of one completion as one grade: the weighted mean.

Invariant: a grade that one of them could not give is a `grader_error`, so a broken reward never passes for a low one.
Called by `graders`.
"""

from collections.abc import Mapping

from shoal.tasks.task import Grade


def combine(grades: Mapping[str, Grade], weights: Mapping[str, float]) -> Grade:
    """The mean of the scores by weight. All wrong formats give a wrong format; a reward of weight 0 is only reported."""
    total = sum(weights.values())
    score = sum(grades[name].score * weight for name, weight in weights.items()) / total
    outcomes = {grade.outcome for name, grade in grades.items() if weights[name]}
    failed = any(grade.outcome == "grader_error" for grade in grades.values())
    details = [f"{name}: {grade.detail or grade.score}" for name, grade in grades.items()]
    return Grade(
        score=0.0 if failed else min(1.0, score),
        outcome="grader_error" if failed else "wrong_format" if outcomes == {"wrong_format"} else "graded",
        detail="; ".join(details),
        tier=next((grade.tier for grade in grades.values() if grade.tier), ""),
        repeatable=all(grade.repeatable for grade in grades.values()),
        parts={name: grade.score for name, grade in grades.items()},
    )
