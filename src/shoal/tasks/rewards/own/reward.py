"""A reward of your own: a Python function in a file that travels with the run, `reward = "my_rewards.py:exact"`.

Invariant: whatever the function does, each completion gets a grade in bounded time: its score, or `grader_error`
with what it raised.
It runs in the sandbox, a fresh process for each call, because a machine need not trust the author of a run. Where
the person who runs the node says SHOAL_TRUST_RUN=1, it runs in a plain process that may import what is installed
there (`trusted`).
Called by `graders` and, for environments of your own, by `environments.own`. Left out: other files of the author's.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from shoal.sandbox import Budget, Limits, Program, Sandbox
from shoal.tasks.rewards.inside import RUN, modules
from shoal.tasks.rewards.own.trusted import RaisedError, RewardError, TrustedFunction
from shoal.tasks.rewards.wire import WireError, pack, unpack
from shoal.tasks.task import Grade, Task
from shoal.tasks.trust import TRUST

BATCH = 64  # completions in one call of a batch function
TRUSTED = "trusted"  # tier of scores that no sandbox made: two machines need not agree on what a plain process sees
END_S = 0.5  # for a process to end after its answer
FIELDS = ("id", "question", "answer", "source", "tests", "metadata")
ADVICE = {
    "timeout": "it took longer than tasks.sandbox.wall_s or cpu_s",
    "memory": "it needs more memory than tasks.sandbox.memory_bytes",
    "output": "it printed too much",
}


class Function(Protocol):
    """What runs `inside`, in a process of its own."""

    def ask(self, call: bytes | None) -> tuple[bytes, bool]:
        """The answer to a call, or to the setup alone; and whether it came within half of the limits. Raises RewardError."""
        ...

    def close(self) -> None: ...


class Own:
    def __init__(
        self,
        name: str,
        source: str,
        limits: Limits,
        tier: str | None = None,
        size: int = 0,
        trusted: bool = False,
        budget: Budget | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """`name` is file.py:function. Raises SandboxError if the tier does not work here."""
        self.name, self.budget = name, budget or Budget()
        size = 1 if trusted else size or min(8, len(os.sched_getaffinity(0)))
        self.tier, self.function = running(name, source, limits, tier, size, trusted, self.budget, packages)
        self.threads = ThreadPoolExecutor(size, "reward")
        self.batched: bool | None = None  # known after the first call

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Raises SandboxError if this machine fails, which says nothing of any completion."""
        pairs = list(zip(tasks, completions, strict=True))
        try:
            if self.batched is None and pairs:
                self.batched = self.function.ask(None)[0] == b"R1"
        except RewardError as error:
            return [self._error(error)] * len(pairs)
        size = BATCH if self.batched else 1
        calls = [pairs[n : n + size] for n in range(0, len(pairs), size)]
        return [grade for grades in self.threads.map(self._call, calls) for grade in grades]

    def close(self) -> None:
        self.function.close()
        self.threads.shutdown()

    def _call(self, pairs: Sequence[tuple[Task, str]]) -> list[Grade]:
        if self.budget.over:
            return [self._error(RewardError("no time is left for it"))] * len(pairs)
        try:
            call = pack([[seen(task) for task, _ in pairs], [completion for _, completion in pairs]])
            answer, early = self.function.ask(call)
            return [self._grade(score, early) for score in _scores(answer, len(pairs))]
        except RaisedError as error:
            if len(pairs) > 1:  # one completion must not cost the others their grades
                return [grade for pair in pairs for grade in self._call([pair])]
            return [self._error(error)]
        except (RewardError, WireError) as error:
            return [self._error(error)] * len(pairs)

    def _grade(self, score: float, early: bool) -> Grade:
        if not 0 <= score <= 1:  # not for NaN either
            return self._error(RewardError(f"it returned {score}; scores must be within [0, 1]"))
        return Grade(score, tier=self.tier, repeatable=early)

    def _error(self, error: Exception) -> Grade:
        return Grade(0.0, "grader_error", f"reward {self.name}: {error}", tier=self.tier, repeatable=False)


def running(
    name: str,
    source: str,
    limits: Limits,
    tier: str | None,
    size: int,
    trusted: bool,
    budget: Budget,
    packages: Sequence[str],
) -> tuple[str, Function]:
    """What runs `name`, file.py:function or file.py:Class, and its tier. Raises SandboxError if that does not work here."""
    file, _, inside = name.rpartition(":")
    setup = pack([file, source, inside])
    if trusted:
        return TRUSTED, TrustedFunction(modules("own/inside"), setup, limits.wall_s)
    sandbox = Sandbox(tier, limits, size, preloaded=modules("own/inside"), packages=packages, budget=budget)
    return sandbox.tier, SandboxedFunction(sandbox, setup)


def seen(task: Task) -> dict[str, str]:
    """What the author's code sees of a task."""
    return {field: getattr(task, field) for field in FIELDS}


class SandboxedFunction:
    def __init__(self, sandbox: Sandbox, setup: bytes) -> None:
        self.sandbox, self.setup = sandbox, setup

    def ask(self, call: bytes | None) -> tuple[bytes, bool]:
        with self.sandbox.open(Program(RUN)) as talk:
            answer: bytes | None = b""
            for frame in [self.setup] if call is None else [self.setup, call]:
                talk.send(frame)
                answer = talk.receive()
                if answer is None:
                    result = talk.close()
                    ended = f"its process ended ({result.outcome}, exit code {result.exit_code})"
                    raise RewardError(ADVICE.get(result.outcome, ended))
                if answer[:1] == b"X":
                    raise RaisedError(_advised(answer[1:].decode(errors="replace")))
            used, limits = talk.close(END_S), self.sandbox.limits
        return answer or b"", used.cpu_s <= limits.cpu_s / 2 and used.wall_s <= limits.wall_s / 2

    def close(self) -> None:
        self.sandbox.close()


def _advised(error: str) -> str:
    """With the remedy where an import failed."""
    if not error.startswith(("ModuleNotFoundError", "ImportError")):
        return error
    return (
        f"{error}; the sandbox has Python's standard library, and numpy with tasks.sandbox.numpy = true: to import what "
        f"else is installed, set {TRUST}=1 on every machine, where its owner trusts the author of this run"
    )


def _scores(answer: bytes, count: int) -> list[float]:
    scores = unpack(answer[1:], refused, refused) if answer[:1] == b"V" else None
    if not isinstance(scores, list) or len(scores) != count or not all(type(score) is float for score in scores):
        raise RewardError("its process answers with something else than scores")
    return scores


def refused(*_: object) -> None:
    """Sets and dicts are no answers, and to build one of hostile items takes quadratic time."""
    raise WireError("its process answers with a set or a dict")
