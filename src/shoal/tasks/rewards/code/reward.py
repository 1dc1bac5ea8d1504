"""The reward `code`: 1 if the completion's program passes all tests of its task, in the sandbox.

Invariant: expected values never enter the process that runs the model's code. Output is compared out here;
assertions run in a second sandboxed process, which calls the first through this one. What a program prints, patches
or exits with says nothing.
A grade is `repeatable` only if the program stayed below half of its time limits and hit no other limit.
Called by `graders`. Left out: arguments that a function changes in place, and objects that are not plain data.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shoal.sandbox import Budget, Limits, Program, Result, Sandbox
from shoal.tasks.rewards.code.compare import Pairs, SetItems, same_output, same_value, shown
from shoal.tasks.rewards.code.extract import program_of
from shoal.tasks.rewards.code.talk import END_S, BadTestsError, Candidate, FailedError, raised, relay
from shoal.tasks.rewards.code.tests import Asserts, Functional, Stdin, Tests, TestsError, read_tests
from shoal.tasks.rewards.inside import RUN, modules
from shoal.tasks.rewards.wire import WireError, pack, unpack
from shoal.tasks.task import Grade, Task

LONGEST_PROGRAM = 1 << 18  # characters
OUTPUT_BYTES = 1 << 20
ALL_CASES = 10  # times the limits of one stdin case: what all cases of a task may use together
SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


class Code:
    """`fraction`: the share of cases that pass, in place of all or nothing. Assertions are one case."""

    def __init__(
        self,
        limits: Limits,
        tier: str | None = None,
        size: int = 0,
        fraction: bool = False,
        budget: Budget | None = None,
    ) -> None:
        """Raises SandboxError if the tier does not work here."""
        self.limits, self.fraction, self.budget = limits, fraction, budget or Budget()
        size = size or min(8, len(os.sched_getaffinity(0)))
        self.candidates = Sandbox(tier, limits, size, preloaded=modules("code/candidate"), budget=self.budget)
        longer = replace(limits, wall_s=2 * limits.wall_s)
        self.checkers = Sandbox(
            self.candidates.tier, longer, size, preloaded=modules("code/checker"), budget=self.budget
        )
        self.threads = ThreadPoolExecutor(size, "code")

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Raises SandboxError if this machine fails, which says nothing of any completion."""
        texts = dict.fromkeys(task.tests for task in tasks)
        tests = dict(zip(texts, self.threads.map(_tests, texts), strict=True))  # once for all completions of a task
        return list(self.threads.map(self._grade, [tests[task.tests] for task in tasks], completions))

    def close(self) -> None:
        self.candidates.close()
        self.checkers.close()
        self.threads.shutdown()

    def _grade(self, tests: Tests | TestsError, completion: str) -> Grade:
        try:
            if isinstance(tests, TestsError):
                raise tests
            if self.budget.over:
                return Grade(0.0, "grader_error", "no time is left to run it", repeatable=False)
            source = program_of(completion).encode(errors="replace").decode()
            if not source.strip() or len(source) > LONGEST_PROGRAM:
                return Grade(0.0, "wrong_format", f"a program of {len(source)} characters; 1 to {LONGEST_PROGRAM} run")
            grade = self._stdin(tests, source) if isinstance(tests, Stdin) else self._calls(tests, source)
        except (TestsError, BadTestsError) as error:
            grade = Grade(0.0, "grader_error", str(error), repeatable=False)
        return replace(grade, tier=self.candidates.tier)

    def _stdin(self, tests: Stdin, source: str) -> Grade:
        """A process for each case. All cases together have limits too: a program may sleep, then pass, a hundred times."""
        passed, detail, repeatable = 0, "", True
        cpu_s = wall_s = 0.0
        for number, (given, expected) in enumerate(tests.cases, start=1):
            limits = replace(self.limits, output_bytes=OUTPUT_BYTES + 2 * len(expected))
            result = self.candidates.run(Program(source, stdin=given.encode(errors="replace")), limits)
            cpu_s, wall_s = cpu_s + result.cpu_s, wall_s + result.wall_s
            used = max(cpu_s / self.limits.cpu_s, wall_s / self.limits.wall_s) / ALL_CASES
            repeatable = repeatable and self._repeatable(result) and used <= 1 / 2
            if used > 1:
                detail = f"case {number} of {len(tests.cases)}: over the time limit of all cases"
                break
            reason = _wrong_output(result, expected)
            if not reason:
                passed += 1
                continue
            detail = detail or f"case {number} of {len(tests.cases)}: {reason}"
            if _syntax_error(result):
                return Grade(0.0, "wrong_format", reason)
            if not self.fraction or result.outcome != "exited":
                break
        return self._grade_of(passed, len(tests.cases), detail, repeatable)

    def _calls(self, tests: Functional | Asserts, source: str) -> Grade:
        """One process for all cases."""
        cases = len(tests.cases) if isinstance(tests, Functional) else 1
        passed, detail, outcome = 0, "", "graded"
        tested: list[Result] = []
        with self.candidates.open(Program(RUN)) as conversation:
            candidate = Candidate(conversation)
            try:
                candidate.load(source, tests.prompt, tests.entry)
                if isinstance(tests, Functional):
                    passed, detail = self._functional(tests, candidate)
                else:
                    with self.checkers.open(Program(RUN)) as checker:
                        try:
                            relay(checker, candidate, tests.code, tests.prompt, tests.entry)
                        finally:
                            tested.append(checker.close(END_S))
                    passed = 1
            except FailedError as error:
                detail, outcome = str(error), error.outcome
                passed = error.passed
            result = candidate.end()
        repeatable = self._within_half(result) and (candidate.ended_here or result.outcome == "exited")
        repeatable = repeatable and all(map(self._repeatable, tested))
        if outcome == "wrong_format":
            return Grade(0.0, "wrong_format", detail, repeatable=repeatable)
        return self._grade_of(passed, cases, detail, repeatable)

    def _functional(self, tests: Functional, candidate: Candidate) -> tuple[int, str]:
        passed, detail = 0, ""
        for number, (args, expected) in enumerate(tests.cases, start=1):
            try:
                reason = _wrong_value(candidate.call(pack([args, {}])), expected)
            except FailedError as error:
                error.passed = passed
                raise
            if not reason:
                passed += 1
                continue
            detail = detail or f"case {number} of {len(tests.cases)}: {reason}"
            if not self.fraction:
                break
        return passed, detail

    def _grade_of(self, passed: int, cases: int, detail: str, repeatable: bool) -> Grade:
        score = passed / cases if self.fraction else float(passed == cases)
        return Grade(score, detail=detail or f"{cases} of {cases} cases pass", repeatable=repeatable)

    def _repeatable(self, result: Result) -> bool:
        return result.outcome == "exited" and self._within_half(result)

    def _within_half(self, result: Result) -> bool:
        return result.cpu_s <= self.limits.cpu_s / 2 and result.wall_s <= self.limits.wall_s / 2


def _tests(text: str) -> Tests | TestsError:
    try:
        return read_tests(text)
    except TestsError as error:
        return error


def _wrong_output(result: Result, expected: str) -> str:
    """Why a run fails its case; empty if it passes."""
    if result.outcome != "exited" or result.exit_code != 0:
        return Candidate.describe(result)
    found = result.stdout.decode(errors="replace")
    return "" if same_output(found, expected) else f"printed {shown(found)}, expected {shown(expected)}"


def _syntax_error(result: Result) -> bool:
    last = result.stderr.rstrip().rpartition(b"\n")[2].decode(errors="replace")
    return result.exit_code == 1 and not result.stdout and last.startswith(SYNTAX_ERRORS)


def _wrong_value(answer: bytes, expected: object) -> str:
    """Why an answer fails its case; empty if it passes."""
    kind = answer[:1]
    if kind == b"U":
        return answer[1:300].decode(errors="replace")
    if kind == b"X":
        return f"raised {raised(answer[1:])}"
    try:
        value = unpack(answer[1:], lambda _, items: SetItems(items), Pairs)
    except WireError as error:
        return f"answered unreadably ({str(error)[:100]})"
    return "" if same_value(value, expected) else f"returned {shown(value)}, expected {shown(expected)}"
