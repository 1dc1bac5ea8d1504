"""The reward `code`: 1 if the completion's program passes all tests of its task, in the sandbox.

Invariants: expected values never enter the process that runs the model's code. Output is compared out here; assertions
run in a second sandboxed process, which calls the first through this one. What a program prints, patches or exits with
says nothing. Every call carries a random number, and its answer must begin with the same number: a program that writes
answers before it is called cannot know the numbers. Nothing that comes out of either process is evaluated here. The
program is found in time linear in the completion, and never parsed here: hostile source can crash a parser. A grade is
`repeatable` only if the program stayed below half of its time limits and hit no other limit.
Left out: arguments that a function changes in place, and objects that are not plain data.
"""

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shoal.errors import ShoalError
from shoal.sandbox import Budget, Program, ProgramLimits, Result, Sandbox, Session
from shoal.sandbox.channel import WireError, pack, unpack
from shoal.tasks.inside import RUN, source
from shoal.tasks.rewards.compare import Pairs, SetItems, same_output, same_value, shown
from shoal.tasks.sources.code_tests import Asserts, Functional, Stdin, Tests, TestsError, read_tests
from shoal.tasks.task import Grade, Outcome, Task

LONGEST_PROGRAM = 1 << 18  # characters
OUTPUT_BYTES = 1 << 20
ALL_CASES = 10  # times the limits of one stdin case: what all cases of a task may use together
SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
NUMBER_BYTES = 8
END_S = 0.5  # for a candidate to end after its last call
FENCE = "```"
PYTHON = ("python", "python3", "py")


class FailedError(ShoalError):
    """The candidate failed; the message says why."""

    def __init__(self, detail: str, outcome: Outcome = "graded") -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


class BadTestsError(ShoalError):
    """The tests failed by themselves, whatever the candidate is."""


class Candidate:
    def __init__(self, conversation: Session) -> None:
        self.conversation = conversation
        self.ended_here = True  # False: it ended before it was asked to

    def load(self, source: str, prompt: str, entry: str) -> None:
        """Run the completion's code up to its functions. Raises FailedError."""
        self.conversation.send(pack([source, prompt, entry]))
        frame = self._receive()
        kind, text = frame[:1], frame[1:300].decode(errors="replace")
        if kind == b"P":
            raise FailedError(f"it does not parse: {text}", "wrong_format")
        if frame != b"R":
            raise FailedError(f"its definitions raise {raised(frame[1:])}" if kind == b"X" else "it wrote out of turn")

    def call(self, arguments: bytes) -> bytes:
        """Return the answer to one call, without its number. Raises FailedError."""
        number = secrets.token_bytes(NUMBER_BYTES)
        self.conversation.send(number + arguments)
        frame = self._receive()
        if frame[:NUMBER_BYTES] != number:
            raise FailedError("it answered before it was asked")
        if len(frame) == NUMBER_BYTES:  # the tests' process ends at an empty answer, and would be blamed
            raise FailedError("it answered nothing")
        return frame[NUMBER_BYTES:]

    def end(self) -> Result:
        return self.conversation.close(END_S)

    def _receive(self) -> bytes:
        frame = self.conversation.receive()
        if frame is None:
            self.ended_here = False
            raise FailedError(self.describe(self.conversation.close(END_S)))
        return frame

    @staticmethod
    def describe(result: Result) -> str:
        last = result.stderr.rstrip().rpartition(b"\n")[2].decode(errors="replace")[:300]
        reasons = {
            "exited": f"it ended with exit code {result.exit_code}",
            "killed": "it was killed",
            "timeout": f"over its time limit ({result.cpu_s:.1f} s of CPU, {result.wall_s:.1f} s)",
            "memory": "over its memory limit",
            "output": "over its limit of output",
        }
        return reasons[result.outcome] + (f": {last}" if last else "")


def relay(checker: Session, candidate: Candidate, tests: str, prompt: str, entry: str) -> None:
    """Let the tests in `checker` call the candidate until they pass. Raises FailedError or BadTestsError."""
    checker.send(pack([tests, prompt, entry]))
    answered = 0
    while (frame := checker.receive()) is not None:
        kind, text = frame[:1], frame[1:].decode(errors="replace")
        if kind == b"C":
            checker.send(candidate.call(frame[1:]))
            answered += 1
        elif kind == b"T" or not answered:
            raise BadTestsError(f"the tests are at fault: {text or 'they call nothing'}")
        elif kind == b"P":
            return
        else:
            raise FailedError(f"call {answered}: {text}")
    result = checker.close(END_S)
    if answered and result.outcome != "exited":
        raise FailedError(f"the tests do not end on its answers ({result.outcome})")
    raise BadTestsError(f"the tests' process died: {Candidate.describe(result)}")


def raised(packed: bytes) -> str:
    """Return the exception that crossed, for people."""
    try:
        name, message = unpack(packed, lambda _, items: SetItems(items), Pairs)
    except (ValueError, TypeError):
        return "an unreadable exception"
    return f"{shown(name)[1:-1]}: {shown(message, 300)[1:-1]}"


# --- the reward -------------------------------------------------------------------------------------------------------


class Code:
    def __init__(
        self, limits: ProgramLimits, tier: str | None = None, size: int = 0, budget: Budget | None = None
    ) -> None:
        """`tier` as in `Sandbox`. Raises SandboxError if it does not work here."""
        self.limits, self.budget = limits, budget or Budget()
        size = size or min(8, len(os.sched_getaffinity(0)))
        self.candidates = Sandbox(tier, limits, size, preloaded={"inside": source("candidate")}, budget=self.budget)
        longer = replace(limits, wall_s=2 * limits.wall_s)
        self.checkers = Sandbox(
            self.candidates.tier, longer, size, preloaded={"inside": source("checker")}, budget=self.budget
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
            program = program_of(completion).encode(errors="replace").decode()
            if not program.strip() or len(program) > LONGEST_PROGRAM:
                return Grade(0.0, "wrong_format", f"a program of {len(program)} characters; 1 to {LONGEST_PROGRAM} run")
            grade = self._stdin(tests, program) if isinstance(tests, Stdin) else self._calls(tests, program)
        except (TestsError, BadTestsError) as error:
            grade = Grade(0.0, "grader_error", str(error), repeatable=False)
        return replace(grade, tier=self.candidates.tier)

    def _stdin(self, tests: Stdin, program: str) -> Grade:
        """Run a process for each case. All cases together have limits too: a program may sleep, then pass, in each."""
        repeatable = True
        cpu_s = wall_s = 0.0
        for number, (given, expected) in enumerate(tests.cases, start=1):
            limits = replace(self.limits, output_bytes=OUTPUT_BYTES + 2 * len(expected))
            result = self.candidates.run(Program(program, stdin=given.encode(errors="replace")), limits)
            cpu_s, wall_s = cpu_s + result.cpu_s, wall_s + result.wall_s
            used = max(cpu_s / self.limits.cpu_s, wall_s / self.limits.wall_s) / ALL_CASES
            repeatable = repeatable and self._repeatable(result) and used <= 1 / 2
            reason = "over the time limit of all cases" if used > 1 else _wrong_output(result, expected)
            if not reason:
                continue
            if used <= 1 and _syntax_error(result):
                return Grade(0.0, "wrong_format", reason)
            return Grade(0.0, detail=f"case {number} of {len(tests.cases)}: {reason}", repeatable=repeatable)
        return Grade(1.0, detail=_all(len(tests.cases)), repeatable=repeatable)

    def _calls(self, tests: Functional | Asserts, program: str) -> Grade:
        """One process for all cases."""
        grade = Grade(1.0, detail=_all(len(tests.cases) if isinstance(tests, Functional) else 1))
        tested: list[Result] = []
        with self.candidates.open(Program(RUN)) as conversation:
            candidate = Candidate(conversation)
            try:
                candidate.load(program, tests.prompt, tests.entry)
                if isinstance(tests, Functional):
                    _functional(tests, candidate)
                else:
                    with self.checkers.open(Program(RUN)) as checker:
                        try:
                            relay(checker, candidate, tests.code, tests.prompt, tests.entry)
                        finally:
                            tested.append(checker.close(END_S))
            except FailedError as error:
                grade = Grade(0.0, error.outcome, str(error))
            result = candidate.end()
        repeatable = self._within_half(result) and (candidate.ended_here or result.outcome == "exited")
        repeatable = repeatable and all(map(self._repeatable, tested))
        return replace(grade, repeatable=repeatable)

    def _repeatable(self, result: Result) -> bool:
        return result.outcome == "exited" and self._within_half(result)

    def _within_half(self, result: Result) -> bool:
        return result.cpu_s <= self.limits.cpu_s / 2 and result.wall_s <= self.limits.wall_s / 2


def _functional(tests: Functional, candidate: Candidate) -> None:
    """Raises FailedError."""
    for number, (args, expected) in enumerate(tests.cases, start=1):
        if reason := _wrong_value(candidate.call(pack([args, {}])), expected):
            raise FailedError(f"case {number} of {len(tests.cases)}: {reason}")


def _all(cases: int) -> str:
    return f"{cases} of {cases} cases pass"


def _tests(text: str) -> Tests | TestsError:
    try:
        return read_tests(text)
    except TestsError as error:
        return error


def _wrong_output(result: Result, expected: str) -> str:
    """Return why a run fails its case; empty if it passes."""
    if result.outcome != "exited" or result.exit_code != 0:
        return Candidate.describe(result)
    printed = result.stdout.decode(errors="replace")
    return "" if same_output(printed, expected) else f"printed {shown(printed)}, expected {shown(expected)}"


def _syntax_error(result: Result) -> bool:
    last = result.stderr.rstrip().rpartition(b"\n")[2].decode(errors="replace")
    return result.exit_code == 1 and not result.stdout and last.startswith(SYNTAX_ERRORS)


def _wrong_value(answer: bytes, expected: object) -> str:
    """Return why an answer fails its case; empty if it passes."""
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


# --- the program in a completion --------------------------------------------------------------------------------------


def program_of(completion: str) -> str:
    """Return the last fenced block marked as Python, or else the last fenced block, or else all of the text.

    A block that the completion does not close runs to its end.

    >>> program_of("Try this:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    >>> program_of("    return x")
    '    return x'
    """
    blocks: list[tuple[bool, list[str]]] = []
    inside = False
    for line in completion.splitlines(keepends=True):
        stripped = line.strip()
        if not stripped.startswith(FENCE):
            if inside:
                blocks[-1][1].append(line)
        elif inside:
            inside = False
        elif stripped.endswith(FENCE) and len(stripped) > 2 * len(FENCE):
            continue  # ```inline```
        else:
            inside = True
            blocks.append((stripped.strip("`").strip().lower() in PYTHON, []))
    if not blocks:
        return completion
    marked = [lines for python, lines in blocks if python]
    return "".join(marked[-1] if marked else blocks[-1][1])
