"""Source text of the code that runs in the sandbox's child processes, and the conversion of its results to grades.

candidate, checker   the program of a code task, and the tests that call it
user_code            rewards and environments by a run's author
equality             the comparison of the reward `math`
gym, tasksets        tasks and scores of reasoning-gym and of verifiers
plain                the decision whether a program prints the same everywhere

Invariant: these files import nothing from Shoal but `channel`. So another interpreter can run them, and a sandbox does
not need the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.sandbox import PLAIN, Budget, CallResult, ProgramLimits, RemoteFunction, Sandbox, StartError
from shoal.tasks.task import Grade, GradeError

RUN = "import inside; inside.main()"  # the program that runs a file with a `main`
# This code gives every machine the same time zone and thread count. `sandbox/forkserver.py` fixes the hash seed.
SAME = """
import os, sys, time
os.environ |= {"OMP_NUM_THREADS": "1", "TZ": "UTC"}
time.tzset()
sys.dont_write_bytecode = True
"""


def source(name: str) -> str:
    """Return the text of a file in this folder, adapted to run in the sandbox."""
    text = Path(__file__).with_name(f"{name}.py").read_text()
    return text.replace("from shoal.sandbox.channel import", "from channel import")


class Grader(RemoteFunction):
    """Calls `function`, defined in the source text `text`, with plain data in a sandbox's child processes.

    The function's result is never trusted. Each server runs the line `prepare` once, before its first call. `tier`,
    `size`, `python` and `budget` are those of `Sandbox`. `reported_tier`: the tier recorded in grades.
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
        python: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.name, self.reported_tier = name, ""
        preloaded = {"same": SAME, "grader": f"{text}\n{prepare}\n"}
        sandbox = Sandbox(tier, limits, size, preloaded=preloaded, budget=budget, python=python)
        describe = 'getattr(grader, "describe", channel.describe)'
        super().__init__(sandbox, f"import channel, grader; channel.serve(grader.{function}, {describe})")

    def calls(self, values: Sequence[Any]) -> list[CallResult]:
        """Call the function for each value. Raise GradeError if no server starts, SandboxError if the sandbox fails."""
        try:
            return super().calls(values)
        except StartError as error:
            if self.sandbox.tier != PLAIN:
                raise  # in other tiers, only Shoal's own code runs at the start
            raise GradeError(f"the grader {self.name} does not start ({error}): install what it imports") from error

    def grades(self, values: Sequence[Any], grade: Callable[[Any], Grade]) -> list[Grade]:
        """Return a grade per value: `grade(answer)`, or a grader error if the call failed."""
        return [self._graded(call, grade) for call in self.calls(values)]

    def failure(self, call: CallResult) -> str:
        """Return why a call gave no answer."""
        limits = self.sandbox.limits
        limit = (
            f"{limits.cpu_s:g} s of CPU time"
            if call.cpu_s >= limits.cpu_s
            else f"{min(limits.wall_s, limits.idle_s):g} s"
        )
        reasons = {
            "raised": call.detail,
            "died": f"the grader died: {call.detail}",
            "timeout": f"it exceeded the limit of {limit}",
            "memory": "it exceeded the memory limit",
            "output": f"it wrote more than {limits.output_bytes} bytes",
            "late": "no time was left for it",
        }
        return reasons[call.ending]

    def _graded(self, call: CallResult, grade: Callable[[Any], Grade]) -> Grade:
        if call.ending == "answered":
            result = grade(call.value)
            return replace(result, repeatable=result.repeatable and call.repeatable, tier=self.reported_tier)
        repeatable = call.repeatable and call.ending == "raised" and not self.reported_tier
        return Grade(0.0, "grader_error", self.failure(call), repeatable=repeatable, tier=self.reported_tier)
