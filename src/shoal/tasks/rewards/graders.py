"""Grade completions with the reward that the task's source names, or with the task's own reward by default.

Invariant: validator, evaluator and the tools all grade here, so the same completion gets the same score.
Rewards start on first use and end with `close`.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from shoal.config.tasks import SandboxSection, SourceSection, TaskSection
from shoal.sandbox import Budget, SandboxError, interpreter
from shoal.tasks import libraries
from shoal.tasks.rewards.answers import Number
from shoal.tasks.rewards.code import Code
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import Grade, GradeError, Reward, Task, trusted
from shoal.tasks.user_code import UserCode, UserReward, is_user_code, program_limits

REWARDS: dict[str, Callable[[SandboxSection, Budget], Reward]] = {
    "number": lambda *_: Number(),
    "math": lambda _, budget: Math(budget),
    "reasoning_gym": lambda _, budget: libraries.LibraryReward("reasoning_gym", budget),
    "verifiers": lambda _, budget: libraries.LibraryReward("verifiers", budget),
    "code": lambda section, budget: Code(program_limits(section), budget=budget),
}
# Packages that affect scores, or the text that is scored.
PACKAGES = "shoal tokenizers transformers math-verify latex2sympy2-extended sympy reasoning-gym verifiers".split()  # noqa: SIM905

log = logging.getLogger(__name__)


class CannotGradeError(GradeError):
    """The sandbox failed twice in a row."""

    restart_helps = True


class Graders:
    """Grades the tasks of a task set. Use it as a context manager, or call `close`."""

    def __init__(
        self, section: TaskSection, *, files: Mapping[str, bytes] | None = None, budget: Budget | None = None
    ) -> None:
        """Raise GradeError, or TasksNotFoundError for a verifiers environment that this machine does not allow.

        `files`: code of user rewards by file name, from the task set. Once `budget` has run out, no reward runs, so
        ignore the grades from then on.
        """
        self.section = section
        self.files = files or {}
        self.budget = budget or Budget()
        self.rewards: dict[str, Reward] = {}  # by name
        self.logged = ""  # the newest grader error, logged once; only here, because its text may quote an answer
        for source in section.sources:
            libraries.check_allowed(source.generator, source.options)
            for name in weights_of(source):
                self._check(source, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()
        self.rewards.clear()

    def try_out(self, tasks: Sequence[Task]) -> None:
        """Grade an empty completion and the gold answer of each task, to expose a broken reward. Raise GradeError."""
        for task in tasks:
            for completion in ("", task.answer):
                [grade] = self.grade([task], [completion])
                if grade.outcome == "grader_error":
                    raise GradeError(
                        f"source {task.source}: its reward fails in a trial on task {task.id} with the completion "
                        f"{completion[:80]!r}: {grade.detail}; fix the reward or the row"
                    )

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Return one grade per completion. Raise GradeError if this machine fails; no completion may cause it."""
        grades: dict[int, Grade] = {}
        for label, default in dict.fromkeys((task.source, task.reward) for task in tasks):
            numbers = [n for n, task in enumerate(tasks) if (task.source, task.reward) == (label, default)]
            source = self.section.source(label)
            graded = self._grade(source, default, [tasks[n] for n in numbers], [completions[n] for n in numbers])
            grades.update(zip(numbers, graded, strict=True))
        error = next((grade.detail for grade in grades.values() if grade.outcome == "grader_error"), self.logged)
        if error != self.logged:
            self.logged = error
            log.warning("a reward failed: %r", error)
        return [grades[n] for n in range(len(tasks))]

    def _grade(
        self, source: SourceSection, default: str, tasks: Sequence[Task], completions: Sequence[str]
    ) -> list[Grade]:
        weights = weights_of(source) or {default: 1.0}
        by_name = {name: self._grade_with(self._reward(source, name), name, tasks, completions) for name in weights}
        if not isinstance(source.reward, dict):
            return next(iter(by_name.values()))
        return [combine({name: by_name[name][n] for name in weights}, weights) for n in range(len(tasks))]

    def _grade_with(self, reward: Reward, name: str, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Grade. Retry once, because a failure of this machine must not become a score of 0, which looks like a lie."""
        try:
            return [grade.in_range() for grade in reward.grade(tasks, completions)]
        except SandboxError:  # try again, because the sandbox has replaced its servers
            pass
        try:
            return [grade.in_range() for grade in reward.grade(tasks, completions)]
        except SandboxError as error:
            raise CannotGradeError(
                f"reward {name}: the sandbox fails on this machine, so it cannot grade: {error}; check its memory, "
                "processes and disk, then start this node again"
            ) from error

    def _reward(self, source: SourceSection, name: str) -> Reward:
        if name not in self.rewards:
            self._check(source, name)
            self.rewards[name] = self._start(name)
        return self.rewards[name]

    def _check(self, source: SourceSection, name: str) -> None:
        if not name:
            raise GradeError(f"source {source.label} names no reward, and neither does its schema; set its reward")
        if name not in REWARDS and not is_user_code(name):
            known = ", ".join(REWARDS)
            raise GradeError(f"source {source.label}: no reward {name!r}; there are {known} and file.py:function")

    def _start(self, name: str) -> Reward:
        section, size = self.section.sandbox, min(8, len(os.sched_getaffinity(0)))
        try:
            if name in REWARDS:
                return REWARDS[name](section, self.budget)
            return UserReward(UserCode(name, self.files, section, size=size, budget=self.budget))
        except SandboxError as error:
            reason = "; ".join(str(error).splitlines())
            raise GradeError(f"reward {name} needs a sandbox: {reason}") from error


def combine(grades: Mapping[str, Grade], weights: Mapping[str, float]) -> Grade:
    """Return the weighted mean of several rewards' grades for one completion.

    A reward of weight 0 appears only in `parts` and `detail`. If any other reward fails, the result is `grader_error`,
    so that a failure is not mistaken for a low score. If all others are `wrong_format`, so is the result.
    """
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


def versions() -> str:
    """Return the versions that scores depend on, as text, and whether the author of the run is trusted."""
    return _installed() + (", trusted" if trusted() else "")


@cache
def _installed() -> str:
    packages = [interpreter()]
    for name in PACKAGES:
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # the package belongs to an extra
            continue
    return ", ".join(packages)


def weights_of(source: SourceSection) -> dict[str, float]:
    """Return the weights of a source's rewards by name; empty if each task names its own reward."""
    if isinstance(source.reward, dict):
        return source.reward
    return {source.reward: 1.0} if source.reward else {}
