"""An environment of your own: a Python class in a file that travels with the run, `environment = "my_env.py:Reverse"`.

It runs where rewards of your own run (`rewards.own`): in the sandbox, a fresh process for each answer, or in a plain
process where the person who runs the machine says SHOAL_TRUST_RUN=1.
Invariants: whatever the class does, `respond` gives an answer in bounded time. An answer that differs between machines
slashes nobody, because the class may read a clock or come near a limit: it is rejected as `unrepeatable`.
Called by `conversation`. Left out: state between calls, other files of the author's.
"""

import logging
from collections.abc import Sequence

from shoal.sandbox import Budget, Limits, SandboxError
from shoal.tasks.environments.interface import Environment
from shoal.tasks.rewards.own.reward import SandboxedFunction, refused, running, seen
from shoal.tasks.rewards.own.trusted import RewardError
from shoal.tasks.rewards.wire import WireError, pack, unpack
from shoal.tasks.task import Task

LONGEST = 10_000  # characters of an answer; a longer one is cut
FAILED = "error: the environment failed"

log = logging.getLogger(__name__)


class OwnEnvironment(Environment):
    def __init__(
        self, name: str, source: str, limits: Limits, tier: str | None, trusted: bool, packages: Sequence[str] = ()
    ) -> None:
        """`name` is file.py:Class. Raises SandboxError if the tier does not work here, RewardError if the file does not."""
        self.name, self.budget, self.reported = name, Budget(), ""
        _, self.function = running(name, source, limits, tier, 1, trusted, self.budget, packages)
        try:
            if self.function.ask(None)[0] != b"R2":
                raise RewardError("it is not a class")
        except BaseException:
            self.close()
            raise

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        try:
            return self.ask(task, seed, turns)
        except (RewardError, SandboxError) as error:
            if str(error) != self.reported:  # it may fail a thousand times in the same way
                self.reported = str(error)
                log.warning("environment %s: %s; the model is answered %r", self.name, error, FAILED)
            return FAILED

    def ask(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """As `respond`. Raises RewardError if the class fails, SandboxError if this machine does."""
        if self.budget.over:
            raise RewardError("no time is left for it")
        answer, _ = self.function.ask(pack([seen(task), seed, list(turns)]))
        try:
            text = unpack(answer[1:], refused, refused)
        except WireError as error:
            raise RewardError(f"its process answers with something else than text ({error})") from error
        if answer[:1] != b"V" or not isinstance(text, str | None):
            raise RewardError("its process answers with something else than text or None")
        if text is None:
            return None
        text = text.encode(errors="replace").decode()
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

    def tolerated(self, task: Task, seed: int, turns: Sequence[str]) -> None:
        return None

    def within(self, budget: Budget) -> None:
        self.budget = budget
        if isinstance(self.function, SandboxedFunction):
            self.function.sandbox.budget = budget

    def close(self) -> None:
        self.function.close()
