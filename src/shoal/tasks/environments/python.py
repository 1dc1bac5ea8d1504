"""Python: the model writes a program in a fenced block, ends its turn, and gets the program's output.

    ```python
    print(12 * 7)
    ```                      the answer is   84

The last closed block of a turn counts. A turn without a closed block ends the conversation. Every program runs in a
fresh process of the sandbox, within the limits of `tasks.sandbox`. If the program fails, the exception's last line
follows the output.
Invariant: no program can make an honest worker slashable, because a different answer slashes nobody.
Left out: state between turns, files, installed packages, several programs at once.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from shoal.sandbox import Budget, Program, ProgramLimits, Result, Sandbox, SandboxError
from shoal.tasks.rewards.code import blocks, texts
from shoal.tasks.task import Environment, Task

MAX_OUTPUT = 1_000  # characters of a program's output in an answer
MAX_ERROR = 200  # characters of the exception's last line
MAX_PROGRAM = 10_000  # characters
OUTPUT_BYTES = 1 << 16  # more output stops a program
NO_OUTPUT = "(no output)"
STOPPED = {
    "timeout": "error: time limit",
    "memory": "error: memory limit",
    "output": "error: too much output",
    "killed": "error: killed",
    "depth": "error: recursion limit",  # interpreter versions count depth differently
    "sandbox": "error: the sandbox failed",
}
# Modules whose results differ between machines or runs. A program can still import them in ways that `IMPORT` misses.
REFUSED = {"time", "datetime", "timeit", "secrets", "uuid", "platform", "os", "socket", "subprocess", "tempfile"}
REFUSED |= {"threading", "asyncio", "multiprocessing", "concurrent", "resource", "gc", "tracemalloc"}
IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:import|from)[ \t]+([^;\n]*)", flags=re.MULTILINE)
ADDRESS = re.compile(r" at 0x[0-9a-f]+")

log = logging.getLogger(__name__)


class Python(Environment):
    repeatable = False  # floats, texts of exceptions and limits differ between machines

    def __init__(self, limits: ProgramLimits) -> None:
        """Raise SandboxError if there is no sandbox here."""
        self.sandbox = Sandbox(limits=replace(limits, output_bytes=OUTPUT_BYTES))

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        program = last_program(turns[-1])
        if program is None:
            return None
        return refusal(program) or answer(self._run(Program(program)))

    def set_budget(self, budget: Budget) -> None:
        self.sandbox.budget = budget

    def close(self) -> None:
        self.sandbox.close()

    def _run(self, program: Program) -> Result | None:
        """Return the program's result; None if the sandbox itself failed."""
        try:
            return self.sandbox.run(program)
        except SandboxError as error:
            log.warning("a program of the model did not run: %s", error)
            return None


def last_program(text: str) -> str | None:
    """Return the last closed block that is marked as Python.

    >>> last_program("So:\\n```python\\nprint(1)\\n```\\nand\\n```python\\nprint(2)")
    'print(1)'
    """
    lines = text.splitlines(keepends=True)
    closed = [block for block in blocks(lines) if block.python and block.closed]
    return texts(lines, closed[-1])[0].removesuffix("\n").encode(errors="replace").decode() if closed else None


def refusal(program: str) -> str:
    """Return the error message for a program that may not run; empty if it may run."""
    if len(program) > MAX_PROGRAM:
        return f"error: a program has at most {MAX_PROGRAM} characters"
    imported = {name for line in IMPORT.findall(program) for name in re.findall(r"\w+", line)}
    refused = sorted(imported & REFUSED)
    return f"error: module {refused[0]} is not available" if refused else ""


def answer(result: Result | None) -> str:
    """Return the answer that the model gets for a program with this result."""
    if result is None:
        return STOPPED["sandbox"]
    if result.outcome != "exited":
        return STOPPED[result.outcome]
    text = _readable(result.stdout, MAX_OUTPUT)
    if result.exit_code == 0:
        return text or NO_OUTPUT
    last = result.stderr.rstrip().rpartition(b"\n")[2]
    if last.startswith(b"RecursionError"):
        return STOPPED["depth"]
    error = _readable(last, MAX_ERROR) or f"error: exit status {result.exit_code}"
    return f"{text}\n{error}" if text else error


def _readable(written: bytes, limit: int) -> str:
    text = ADDRESS.sub(" at 0x0", written.decode(errors="replace")).rstrip()
    return text if len(text) <= limit else f"{text[:limit]}..."
