"""Several rewards of one completion as one grade: the weighted mean.

Invariant: if a reward that counts fails, the whole grade is a `grader_error`, so a broken reward never passes for a low one.
A reward of weight 0 does not count: it appears in `parts` and `detail` and changes nothing else.
Called by `graders`.
"""

from collections.abc import Mapping

from shoal.tasks.task import Grade


def combine(grades: Mapping[str, Grade], weights: Mapping[str, float]) -> Grade:
    """The mean of the scores by weight; a wrong format if every reward that counts found one."""
    counted = [grade for name, grade in grades.items() if weights[name]]
    total = sum(weights.values())
    score = sum(grades[name].score * weight for name, weight in weights.items()) / total
    outcomes = {grade.outcome for grade in counted}
    failed = "grader_error" in outcomes
    details = [f"{name}: {grade.detail or grade.score}" for name, grade in grades.items()]
    return Grade(
        score=0.0 if failed else min(1.0, score),
        outcome="grader_error" if failed else "wrong_format" if outcomes == {"wrong_format"} else "graded",
        detail="; ".join(details),
        tier=next((grade.tier for grade in counted if grade.tier), ""),
        repeatable=all(grade.repeatable for grade in counted),
        parts={name: grade.score for name, grade in grades.items()},
    )
