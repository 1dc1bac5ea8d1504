"""Rewards and environments of your own: a function or a class in a file that travels with the run, `"my_rewards.py:exact"`.

Invariants: whatever the author's code does, each completion gets a grade and each turn an answer in bounded time. A
reward that fails is a `grader_error` with what it raised. An environment's answer that differs between machines slashes
nobody, because the class may read a clock or come near a limit: it is rejected as `unrepeatable`. The code runs in the
sandbox, a fresh process for each call, because a machine need not trust the author of a run. Where the person who runs
the node says SHOAL_TRUST_RUN=1, it runs in one plain process that stays warm and may import what is installed there.
Left out: other files of the author's; state of an environment between calls.
"""

import ast
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.config import ConfigError
from shoal.config.tasks import SandboxSection
from shoal.sandbox import PLAIN, Budget, Call, Function, Limits, Sandbox, SandboxError
from shoal.tasks.inside import RUN, source
from shoal.tasks.task import TRUST, Environment, Grade, Task, trusted

BATCH = 64  # completions in one call of a batch function
TRUSTED = "trusted"  # tier of scores that no wall surrounds: two machines need not agree on what a plain process sees
FIELDS = ("id", "question", "answer", "source", "tests", "metadata")
LONGEST_ANSWER = 10_000  # characters of an environment's answer; a longer one is cut
FAILED = "error: the environment failed"

log = logging.getLogger(__name__)
Named = TypeVar("Named", ast.FunctionDef, ast.ClassDef)


def is_own(name: str) -> bool:
    return ".py:" in name


def file_of(name: str) -> str:
    """Return the name that the file of a reward or an environment of your own has in the task set."""
    return Path(name.rpartition(":")[0]).name


def limits_of(section: SandboxSection) -> Limits:
    return Limits(wall_s=section.wall_s, cpu_s=section.cpu_s, memory_bytes=section.memory_bytes)


def tier_of(section: SandboxSection) -> str | None:
    """Return the tier that is asked for; None: the strongest. Raises SandboxError where it must not be used."""
    if section.tier == "rlimits" and not trusted():
        raise SandboxError(
            f'tasks.sandbox.tier = "rlimits" protects only memory and time on this machine; set {TRUST}=1 here if you '
            "trust the author of this run, or use another tier"
        )
    return None if section.tier == "auto" else section.tier


class OwnError(Exception):
    """The author's code failed; the message says how."""


class RaisedError(OwnError):
    """It raised an exception, or returned something of another type than it should."""


class AuthorCode:
    """The function or class that `name`, "file.py:NAME", names: in `size` processes, or in one where the run is trusted.

    `files` is source by file name, from the task set. Raises OwnError if the file is not there, SandboxError if the tier
    does not work here.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        section: SandboxSection,
        *,
        size: int = 1,
        budget: Budget | None = None,
    ) -> None:
        path, _, inside = name.rpartition(":")
        if file_of(name) not in files:
            raise OwnError(f"the task set does not hold {file_of(name)}; make it again")
        kept = trusted()
        tier = PLAIN if kept else tier_of(section)
        packages = ["numpy"] if section.numpy and not kept else []
        preloaded = {"inside": source("own")}
        size = 1 if kept else size
        self.sandbox = Sandbox(tier, limits_of(section), size, preloaded=preloaded, packages=packages, budget=budget)
        program = f"import sys; sys.path.insert(0, ''); {RUN}" if kept else RUN  # what lies beside the run, too
        setup = [path, files[file_of(name)].decode(errors="replace"), inside]
        self.function = Function(self.sandbox, program, setup, keep=kept)
        self.tier = TRUSTED if kept else self.sandbox.tier

    def kind(self) -> Any:
        """Return what the file defines: "function", "batch function" or "class". Raises OwnError, SandboxError."""
        return self._value(self.function.set_up())

    def ask(self, call: Any) -> tuple[Any, bool]:
        """Return its answer, and whether it came within half of the limits. Raises OwnError, SandboxError."""
        answer = self.function.call(call)
        return self._value(answer), answer.repeatable

    def close(self) -> None:
        self.function.close()

    def _value(self, call: Call) -> Any:
        advice = {
            "timeout": "it took longer than tasks.sandbox.wall_s or cpu_s",
            "memory": "it needs more memory than tasks.sandbox.memory_bytes",
            "output": "it printed too much",
            "late": "no time is left for it",
            "died": call.detail,
        }
        if call.ending == "answered":
            return call.value
        if call.ending != "raised":
            raise OwnError(advice[call.ending])
        imported = call.detail.startswith(("ModuleNotFoundError", "ImportError")) and self.tier != TRUSTED
        remedy = (
            "; the sandbox has Python's standard library, and numpy with tasks.sandbox.numpy = true: to import what else is "
            f"installed, set {TRUST}=1 on every machine, where its owner trusts the author of this run"
        )
        raise RaisedError(call.detail + (remedy if imported else ""))


def _seen(task: Task) -> dict[str, str]:
    """Return what the author's code sees of a task."""
    return {field: getattr(task, field) for field in FIELDS}


class OwnReward:
    """`name` is file.py:function."""

    def __init__(self, name: str, code: AuthorCode) -> None:
        self.name, self.code = name, code
        self.batched: bool | None = None  # known after the first call

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Raises SandboxError if this machine fails, which says nothing of any completion."""
        pairs = list(zip(tasks, completions, strict=True))
        try:
            if self.batched is None and pairs:
                self.batched = self.code.kind() == "batch function"
        except OwnError as error:
            return [self._error(error)] * len(pairs)
        size = BATCH if self.batched else 1
        calls = [pairs[n : n + size] for n in range(0, len(pairs), size)]
        return [grade for grades in self.code.function.in_threads(self._call, calls) for grade in grades]

    def close(self) -> None:
        self.code.close()

    def _call(self, pairs: Sequence[tuple[Task, str]]) -> list[Grade]:
        try:
            scores, early = self.code.ask([[_seen(task) for task, _ in pairs], [completion for _, completion in pairs]])
        except RaisedError as error:
            if len(pairs) > 1:  # one completion must not cost the others their grades
                return [grade for pair in pairs for grade in self._call([pair])]
            return [self._error(error)]
        except OwnError as error:
            return [self._error(error)] * len(pairs)
        if (
            not isinstance(scores, list)
            or len(scores) != len(pairs)
            or any(type(score) is not float for score in scores)
        ):
            return [self._error("its process answers with something else than scores")] * len(pairs)
        return [self._grade(score, early) for score in scores]

    def _grade(self, score: float, early: bool) -> Grade:
        if not 0 <= score <= 1:  # not for NaN either
            return self._error(f"it returned {score}; scores must be within [0, 1]")
        return Grade(score, tier=self.code.tier, repeatable=early)

    def _error(self, error: object) -> Grade:
        return Grade(0.0, "grader_error", f"reward {self.name}: {error}", tier=self.code.tier, repeatable=False)


class OwnEnvironment(Environment):
    """`name` is file.py:Class. Raises OwnError if the file does not work, SandboxError if this machine does not."""

    def __init__(self, name: str, code: AuthorCode) -> None:
        self.name, self.code, self.reported = name, code, ""
        try:
            if self.code.kind() != "class":
                raise OwnError("it is not a class")
        except BaseException:
            self.close()
            raise

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        try:
            return self.ask(task, seed, turns)
        except (OwnError, SandboxError) as error:
            if str(error) != self.reported:  # it may fail a thousand times in the same way
                self.reported = str(error)
                log.warning("environment %s: %s; the model is answered %r", self.name, error, FAILED)
            return FAILED

    def ask(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """Return what `respond` returns. Raises OwnError if the class fails, SandboxError if this machine does."""
        text, _ = self.code.ask([_seen(task), seed, list(turns)])
        if not isinstance(text, str | None):
            raise OwnError("its process answers with something else than text or None")
        if text is None:
            return None
        text = text.encode(errors="replace").decode()
        return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}..."

    def tolerated(self, task: Task, seed: int, turns: Sequence[str]) -> None:
        return None

    def within(self, budget: Budget) -> None:
        self.code.sandbox.budget = budget

    def close(self) -> None:
        self.code.close()


# --- before a run: the code is parsed, never run, and only on the machine that compiles the task set ----------------


def check_function(reward: str, source: bytes) -> None:
    """Check that `source` defines the function that `reward`, "file.py:name", names. Raises ConfigError."""
    function = _named(f"reward {reward!r}", reward, source, ast.FunctionDef, "function")
    if len(_parameters(function)) < 2:
        raise ConfigError(
            f"reward {reward!r}: {function.name} must take (task, completion), or (tasks, completions) for a batch; "
            "change its parameters"
        )


def check_environment(environment: str, source: bytes) -> None:
    """Check that `source` defines the class that `environment`, "file.py:Name", names. Raises ConfigError."""
    what = f"environment {environment!r}"
    named = _named(what, environment, source, ast.ClassDef, "class")
    methods = [node for node in named.body if isinstance(node, ast.FunctionDef) and node.name == "respond"]
    if not named.bases and not methods:
        raise ConfigError(f"{what}: {named.name} has no method respond(self, task, seed, turns); add it")
    if methods and len(_parameters(methods[-1])) != 4:
        raise ConfigError(f"{what}: respond must take (self, task, seed, turns); change its parameters")


def _named(what: str, name: str, source: bytes, kind: type[Named], word: str) -> Named:
    path, _, wanted = name.rpartition(":")
    try:
        body = ast.parse(source, path).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{what}: {path} is not valid Python ({error}); correct the file") from error
    nodes = [node for node in body if isinstance(node, kind)]
    named = next((node for node in nodes if node.name == wanted), None)
    if named is None:
        there = f"it has {', '.join(node.name for node in nodes)}" if nodes else "it has none"
        raise ConfigError(f"{what}: {path} has no {word} {wanted!r} ({there}); correct the config or the file")
    return named


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return function.args.posonlyargs + function.args.args
