"""Code that runs in the sandbox's child processes, as text, and how its results become grades.

candidate, checker               the two sides of a code task
own                              code of a run's author
equality, gym, tasksets          graders of answers and of other libraries' tasks
plain                            which programs print the same everywhere

Invariant: these files import nothing of Shoal but `channel`, so that another interpreter can run them and a wall need
not show the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.sandbox import PLAIN, Budget, CallResult, ProgramLimits, RemoteFunction, Sandbox, StartError
from shoal.tasks.task import Grade, GradeError

RUN = "import inside; inside.main()"  # the program of a file with a `main`
# The same time zone and thread count on every machine; hash seeds are fixed elsewhere.
SAME = """
import os, sys, time
os.environ |= {"OMP_NUM_THREADS": "1", "TZ": "UTC"}
time.tzset()
sys.dont_write_bytecode = True
"""


def source(name: str) -> str:
    """Return a file of this folder as a module that runs in the sandbox."""
    text = Path(__file__).with_name(f"{name}.py").read_text()
    return text.replace("from shoal.sandbox.channel import", "from channel import")


class Grader:
    """`function` of the module `text`, called with plain data in children of the sandbox.

    Its values are not trusted; in the tier `plain` the function is. Each server runs the line `prepare` once, before its
    first call. Each child is called with `setup` first, unless it is None. No call begins after the end of `budget`.
    `python`: the interpreter of the tier `plain`. `tier`: what grades say of where they ran.
    """

    def __init__(
        self,
        name: str,
        text: str,
        function: str,
        limits: ProgramLimits,
        *,
        tier: str | None = PLAIN,
        size: int = 1,
        prepare: str = "",
        setup: Any = None,
        python: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.name, self.limits, self.tier = name, limits, ""
        preloaded = {"same": SAME, "grader": f"{text}\n{prepare}\n"}
        sandbox = Sandbox(tier, limits, size, preloaded=preloaded, budget=budget, python=python)
        describe = 'getattr(grader, "described", channel.described)'
        program = f"import channel, grader; channel.serve(grader.{function}, {describe})"
        self.function = RemoteFunction(sandbox, program, setup)

    def calls(self, values: Sequence[Any]) -> list[CallResult]:
        """Call with each value, in order. Raises GradeError if it does not start, SandboxError if this machine fails."""
        try:
            return self.function.calls(values)
        except StartError as error:
            if self.function.sandbox.tier != PLAIN:
                raise  # only Shoal's own code starts there
            raise GradeError(f"the grader {self.name} does not start ({error}): install what it imports") from error

    def grades(self, values: Sequence[Any], grade: Callable[[Any], Grade]) -> list[Grade]:
        """Return a grade per value: `grade(answer)`, or a grader error if the call failed."""
        return [self._graded(call, grade) for call in self.calls(values)]

    def failure(self, call: CallResult) -> str:
        """Return why a call gave no answer."""
        limit = (
            f"{self.limits.cpu_s:g} s of CPU time" if call.cpu_s >= self.limits.cpu_s else f"{self.limits.wall_s:g} s"
        )
        reasons = {
            "raised": call.detail,
            "died": f"the grader died: {call.detail}",
            "timeout": f"the limit of {limit} passed",
            "memory": "over the limit of memory",
            "output": f"it writes more than {self.limits.output_bytes} bytes",
            "late": "no time is left for it",
        }
        return reasons[call.ending]

    def close(self) -> None:
        self.function.close()

    def _graded(self, call: CallResult, grade: Callable[[Any], Grade]) -> Grade:
        if call.ending == "answered":
            result = grade(call.value)
            return replace(result, repeatable=result.repeatable and call.repeatable, tier=self.tier)
        repeatable = call.repeatable and call.ending == "raised" and not self.tier
        return Grade(0.0, "grader_error", self.failure(call), repeatable=repeatable, tier=self.tier)
