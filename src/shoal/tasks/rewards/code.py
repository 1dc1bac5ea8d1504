"""The reward `code`: 1 if the completion's program passes all tests of its task, in the sandbox.

Invariants: expected values never enter the process that runs the model's code. Output is compared here, outside the
sandbox. Assertions run in a second sandboxed process, which calls the first process through this one. A program cannot
fake a pass by printing or patching anything, or by its exit code. Every call carries a random number, and its answer
must begin with the same number, so a program cannot write answers before it is called. Nothing that comes out of either
process is evaluated here. The program is extracted in time linear in the completion's length, and never parsed here,
because hostile source can crash a parser. A grade is `repeatable` only if the program stayed below half of its time
limits and hit no other limit.
Left out: arguments that a function changes in place, and objects that are not plain data.
"""

import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.sandbox import Budget, Program, ProgramLimits, Result, Sandbox, SandboxProcess
from shoal.sandbox.channel import WireError, pack, unpack
from shoal.tasks.inside import RUN, source
from shoal.tasks.rewards.answers import visible
from shoal.tasks.rewards.compare import Pairs, SetItems, same_output, same_value, shown
from shoal.tasks.sources.code_tests import Asserts, Functional, Stdin, Tests, TestsError, read_tests
from shoal.tasks.task import Grade, Outcome, Task

MAX_PROGRAM = 1 << 18  # characters
OUTPUT_BYTES = 1 << 20
ALL_CASES = 10  # time limit of all stdin cases of a task together, as a multiple of one case's limit
SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
NUMBER_BYTES = 8
END_S = 0.5  # time for a process to end after its last call
FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)")
PYTHON = re.compile(r"[{.\s]*(?:python|py)3?\b", re.IGNORECASE)
MAX_ENDS = 4  # fences at which a block may end


class FailedError(ShoalError):
    """The candidate failed."""

    def __init__(self, detail: str, outcome: Outcome = "graded") -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


class BadTestsError(ShoalError):
    """The tests are at fault, whatever the candidate does."""


class Candidate:
    """The process that runs a completion's program."""

    def __init__(self, process: SandboxProcess) -> None:
        self.process = process
        self.ended_early = False  # whether it ended before it answered

    def load(self, source: str, prompt: str, entry: str) -> None:
        """Run the completion's code, which defines its functions. Raise FailedError."""
        self.process.send(pack([source, prompt, entry]))
        frame = self._receive()
        kind, text = frame[:1], frame[1:300].decode(errors="replace")
        if kind == b"P":
            raise FailedError(f"it does not parse: {text}", "wrong_format")
        if frame != b"R":
            raise FailedError(
                f"its definitions raise {raised(frame[1:])}"
                if kind == b"X"
                else "it wrote to the channel before a call"
            )

    def call(self, arguments: bytes) -> bytes:
        """Return the answer to one call, without its number. Raise FailedError."""
        number = secrets.token_bytes(NUMBER_BYTES)
        self.process.send(number + arguments)
        frame = self._receive()
        if frame[:NUMBER_BYTES] != number:
            raise FailedError("it answered before it was called")
        if len(frame) == NUMBER_BYTES:  # it would end the tests' process, so the tests would be blamed
            raise FailedError("its answer is empty")
        return frame[NUMBER_BYTES:]

    def _receive(self) -> bytes:
        frame = self.process.receive()
        if frame is None:
            self.ended_early = True
            raise FailedError(describe(self.process.close(END_S)))
        return frame


def describe(result: Result) -> str:
    """Return a readable description of how a program ended."""
    last = _last_line(result)[:300]
    reasons = {
        "exited": f"it ended with exit code {result.exit_code}",
        "killed": "it was killed",
        "timeout": f"it exceeded its time limit ({result.cpu_s:.1f} s of CPU time, {result.wall_s:.1f} s in all)",
        "memory": "it exceeded its memory limit",
        "output": "it exceeded its output limit",
    }
    return reasons[result.outcome] + (f": {last}" if last else "")


def _last_line(result: Result) -> str:
    return result.stderr.rstrip().rpartition(b"\n")[2].decode(errors="replace")


def relay(checker: SandboxProcess, candidate: Candidate, tests: str, prompt: str, entry: str) -> None:
    """Let the tests in `checker` call the candidate until they pass. Raise FailedError or BadTestsError."""
    checker.send(pack([tests, prompt, entry]))
    answered = 0
    while (frame := checker.receive()) is not None:
        kind, text = frame[:1], frame[1:].decode(errors="replace")
        if kind == b"C":
            checker.send(candidate.call(frame[1:]))
            answered += 1
        elif kind == b"T" or not answered:
            raise BadTestsError(f"the tests are at fault: {text or 'they never call the function'}")
        elif kind == b"P":
            return
        else:
            raise FailedError(f"call {answered}: {text}")
    result = checker.close(END_S)
    if answered and result.outcome != "exited":
        raise FailedError(f"its answers keep the tests from ending ({result.outcome})")
    raise BadTestsError(f"the tests' process died: {describe(result)}")


def raised(packed: bytes) -> str:
    """Return a readable description of an exception that a process reported."""
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
        """`tier` as in `Sandbox`. Raise SandboxError if it does not work here."""
        self.limits, self.budget = limits, budget or Budget()
        size = size or min(8, len(os.sched_getaffinity(0)))
        self.candidates = Sandbox(tier, limits, size, preloaded={"inside": source("candidate")}, budget=self.budget)
        longer = replace(limits, wall_s=2 * limits.wall_s)
        tier = self.candidates.tier
        self.checkers = Sandbox(tier, longer, size, preloaded={"inside": source("checker")}, budget=self.budget)
        self.threads = ThreadPoolExecutor(size, "code")

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Return one grade per completion. Raise SandboxError if this machine fails."""
        texts = dict.fromkeys(task.tests for task in tasks)
        tests = dict(zip(texts, self.threads.map(_tests, texts), strict=True))  # parsed once per task
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
            for program in programs_of(completion):
                grade = self._grade_program(tests, program.encode(errors="replace").decode())
                if grade.outcome != "wrong_format":
                    break
        except (TestsError, BadTestsError) as error:
            grade = Grade(0.0, "grader_error", str(error), repeatable=False)
        return replace(grade, tier=self.candidates.tier)

    def _grade_program(self, tests: Tests, program: str) -> Grade:
        if not program.strip() or len(program) > MAX_PROGRAM:
            detail = f"the program has {len(program)} characters; it needs 1 to {MAX_PROGRAM}"
            return Grade(0.0, "wrong_format", detail)
        return self._stdin(tests, program) if isinstance(tests, Stdin) else self._calls(tests, program)

    def _stdin(self, tests: Stdin, program: str) -> Grade:
        """Run a process for each case. Their total time is limited, too, because a program may sleep in every case."""
        script = f"import inside; inside.script({program!r}, globals())"
        repeatable = True
        cpu_s = wall_s = 0.0
        for number, (given, expected) in enumerate(tests.cases, start=1):
            limits = replace(self.limits, output_bytes=OUTPUT_BYTES + 2 * len(expected))
            result = self.candidates.run(Program(script, stdin=given.encode(errors="replace")), limits)
            cpu_s, wall_s = cpu_s + result.cpu_s, wall_s + result.wall_s
            used = max(cpu_s / self.limits.cpu_s, wall_s / self.limits.wall_s) / ALL_CASES
            repeatable = repeatable and self._repeatable(result) and used <= 1 / 2
            reason = "it exceeded the time limit of all cases together" if used > 1 else _wrong_output(result, expected)
            if not reason:
                continue
            syntax_error = result.exit_code == 1 and not result.stdout and _last_line(result).startswith(SYNTAX_ERRORS)
            if used <= 1 and syntax_error:
                return Grade(0.0, "wrong_format", reason)
            return Grade(0.0, detail=f"case {number} of {len(tests.cases)}: {reason}", repeatable=repeatable)
        return Grade(1.0, detail=_all_pass(len(tests.cases)), repeatable=repeatable)

    def _calls(self, tests: Functional | Asserts, program: str) -> Grade:
        """Run the program in one process, and call its function there for every case."""
        grade = Grade(1.0, detail=_all_pass(len(tests.cases) if isinstance(tests, Functional) else 1))
        checked: list[Result] = []
        with self.candidates.open(Program(RUN)) as process:
            candidate = Candidate(process)
            try:
                candidate.load(program, tests.prompt, tests.entry)
                if isinstance(tests, Functional):
                    for number, (args, expected) in enumerate(tests.cases, start=1):
                        if reason := _wrong_value(candidate.call(pack([args, {}])), expected):
                            raise FailedError(f"case {number} of {len(tests.cases)}: {reason}")
                else:
                    with self.checkers.open(Program(RUN)) as checker:
                        try:
                            relay(checker, candidate, tests.code, tests.prompt, tests.entry)
                        finally:
                            checked.append(checker.close(END_S))
            except FailedError as error:
                grade = Grade(0.0, error.outcome, str(error))
            result = process.close(END_S)
        repeatable = self._within_half(result) and (result.outcome == "exited" or not candidate.ended_early)
        repeatable = repeatable and all(map(self._repeatable, checked))
        return replace(grade, repeatable=repeatable)

    def _repeatable(self, result: Result) -> bool:
        return result.outcome == "exited" and self._within_half(result)

    def _within_half(self, result: Result) -> bool:
        return (
            result.cpu_s <= self.limits.cpu_s / 2 and result.wall_s <= min(self.limits.wall_s, self.limits.idle_s) / 2
        )


def _all_pass(cases: int) -> str:
    return f"{cases} of {cases} cases pass"


def _tests(text: str) -> Tests | TestsError:
    try:
        return read_tests(text)
    except TestsError as error:
        return error


def _wrong_output(result: Result, expected: str) -> str:
    """Return why the result fails its case; empty if it passes."""
    if result.outcome != "exited" or result.exit_code != 0:
        return describe(result)
    printed = result.stdout.decode(errors="replace")
    return "" if same_output(printed, expected) else f"printed {shown(printed)}, expected {shown(expected)}"


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
        return f"returned something unreadable ({str(error)[:100]})"
    return "" if same_value(value, expected) else f"returned {shown(value)}, expected {shown(expected)}"


# --- the program in a completion --------------------------------------------------------------------------------------


class Block(NamedTuple):
    python: bool
    indent: int
    marks: str  # of its opening fence
    start: int  # its first line
    closed: bool = False

    def may_end(self, fence: re.Match[str]) -> bool:
        return len(fence[1]) <= self.indent + 3 and (fence[3] != "" or fence[2].startswith(self.marks))


def programs_of(completion: str) -> list[str]:
    """Return the program of a completion, and longer ones to try in turn if it does not parse.

    It is the last fenced block marked as Python, or else the last fenced block, or else the whole text. A longer program
    ends at a later fence, because the program's own strings may contain fences.

    >>> programs_of("Try this:\\n```python\\nx = 1\\n```\\nDone.")
    ['x = 1\\n']
    >>> programs_of("    return x")
    ['    return x']
    """
    lines = visible(completion).splitlines(keepends=True)
    found = blocks(lines)
    if not found:
        return ["".join(lines)]
    return texts(
        lines, [block for block in found if block.python][-1] if any(block.python for block in found) else found[-1]
    )


def blocks(lines: list[str]) -> list[Block]:
    """Return the fenced blocks of CommonMark, except that a marked fence opens a block inside of another, unclosed one."""
    found: list[Block] = []
    for number, line in enumerate(lines):
        fence = FENCE.fullmatch(line.rstrip())
        last = found[-1] if found and not found[-1].closed else None
        if fence is None or last and not last.may_end(fence):
            continue
        if last and not fence[3]:
            found[-1] = last._replace(closed=True)
        else:
            found.append(Block(PYTHON.match(fence[3]) is not None, len(fence[1]), fence[2], number + 1))
    return found


def texts(lines: list[str], block: Block) -> list[str]:
    """Return the text of a block up to each of the next fences that may close it; to the end of the text if none may."""
    found: list[str] = []
    inside: list[str] = []
    for line in lines[block.start :]:
        fence = FENCE.fullmatch(line.rstrip())
        if fence and block.may_end(fence):
            found.append("".join(inside))
            if fence[3] or len(found) == MAX_ENDS:
                return found
        inside.append(re.sub(rf"^[ \t]{{0,{block.indent}}}", "", line))
    return found or ["".join(inside)]
