"""What runs in children of the sandbox, as text, and how its functions become grades.

candidate, checker               the two sides of a code task
own                              code of a run's author
equality, gym, tasksets          graders that `Grader` starts
plain                            which programs print the same everywhere

Invariant: these files import nothing of Shoal but `channel`, so that another interpreter can run them and a wall need
not show the package.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.sandbox import PLAIN, Budget, Call, Function, Limits, Sandbox, StartError
from shoal.tasks.task import Grade

RUN = "import inside; inside.main()"  # the program of a file with a `main`
WALL_S = 60.0  # for a grader that waits; CPU time is what bounds one that computes
# One time zone and one way to compute on every machine; hashes, and with them the order of sets, are fixed anyway.
SAME = """
import os, sys, time
os.environ |= {"OMP_NUM_THREADS": "1", "TZ": "UTC"}
time.tzset()
sys.dont_write_bytecode = True
"""


class GraderStartError(ShoalError):
    """A grader's process does not start; the message has its last words."""


def source(name: str) -> str:
    """Return a file of this folder as a module that runs in the sandbox."""
    text = Path(__file__).with_name(f"{name}.py").read_text()
    return text.replace("from shoal.sandbox.channel import", "from channel import")


class Grader:
    """`function` of the module `text`, called with plain data in children of the sandbox's tier `plain`.

    The function is trusted, its values are not. The servers start with the first call; each runs `prepare(*arguments)` once,
    unless `arguments` is None. No call begins after the end of `budget`. Limits count CPU time, so a busy machine
    changes no score.
    """

    def __init__(
        self,
        name: str,
        text: str,
        function: str,
        *,
        cpu_s: float,
        memory_bytes: int,
        wall_s: float = WALL_S,
        output_bytes: int = 1 << 20,
        size: int = 1,
        arguments: Sequence[Any] | None = (),
        python: str = sys.executable,
        budget: Budget | None = None,
    ) -> None:
        self.name, self.limits = name, Limits(wall_s, cpu_s, memory_bytes, output_bytes=output_bytes)
        prepare = "" if arguments is None else f"\nprepare(*{list(arguments)!r})\n"
        preloaded = {"same": SAME, "grader": text + prepare}
        sandbox = Sandbox(PLAIN, self.limits, size, preloaded=preloaded, budget=budget, python=python)
        self.function = Function(sandbox, f"import channel, grader; channel.serve(grader.{function})")

    def calls(self, values: Sequence[Any]) -> list[Call]:
        """Return how each call ended, in order. Raises GraderStartError, and SandboxError if this machine fails."""
        try:
            return self.function.calls(values)
        except StartError as error:
            raise GraderStartError(
                f"the grader {self.name} does not start ({error}): install what it imports"
            ) from error

    def grades(self, values: Sequence[Any], grade: Callable[[Any, bool], Grade]) -> list[Grade]:
        """Return a grade per value: `grade(answer, repeatable)`, or a grader error where the call gave none."""
        return [self._graded(call, grade) for call in self.calls(values)]

    def close(self) -> None:
        self.function.close()

    def _graded(self, call: Call, grade: Callable[[Any, bool], Grade]) -> Grade:
        if call.ending == "answered":
            return grade(call.value, call.repeatable)
        limit = (
            f"{self.limits.cpu_s:g} s of CPU time" if call.cpu_s >= self.limits.cpu_s else f"{self.limits.wall_s:g} s"
        )
        reasons = {
            "raised": call.detail,
            "died": f"the grader died: {call.detail}",
            "timeout": f"the limit of {limit} passed",
            "memory": "over the limit of memory",
            "output": f"it answers with more than {self.limits.output_bytes} bytes",
            "late": "no time is left for it",
        }
        return Grade(0.0, "grader_error", reasons[call.ending], repeatable=call.repeatable and call.ending == "raised")
