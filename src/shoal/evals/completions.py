"""Completions of an evaluation: what is asked of a model, what it answered, and the file that keeps every answer.

Invariant: a completion in the file is whole; one that a killed process left half written is cut off when the file is opened
again. The last line of a key counts. Lines have the fields that `shoal grade` reads, and more.
Called by `evaluate` and by the samplers.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shoal.errors import ShoalError, UserError
from shoal.files import fsync
from shoal.model.sampling import rollout_seed


class EvalError(ShoalError):
    """An evaluation that cannot start or continue; the message names the next step."""


class EvalUsageError(EvalError, UserError):
    """What was asked for cannot be evaluated: a suite, a server's address, or a folder of another evaluation."""


@dataclass(frozen=True)
class Asked:
    """One completion that a model is asked for."""

    suite: str
    task: str  # id
    sample: int  # 0 to k - 1
    message: str  # what the user says: prompt and question
    run_seed: int = 0

    @property
    def seed(self) -> int:
        """Follows from suite, task and sample, so it is the same in any order and after a restart."""
        return rollout_seed(f"shoal/eval/{self.run_seed}/{self.suite}", 0, self.task, 0, self.sample)

    @property
    def key(self) -> "Key":
        return self.suite, self.task, self.sample


Key = tuple[str, str, int]


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int | None  # None if a server does not say
    ended: bool  # False: cut off at the most tokens allowed


class CompletionLog:
    """Use as a context manager. One process at a time: a second one that opens the file is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock()
        self.answers: dict[str, dict[Key, Answer]] = {}  # by model
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def of(self, model: str) -> dict[Key, Answer]:
        return self.answers.setdefault(model, {})

    def append(self, model: str, answered: Sequence[tuple[Asked, Answer]]) -> None:
        """On disk when this returns."""
        lines = [_line(model, asked, answer) for asked, answer in answered]
        data = memoryview("".join(lines).encode())
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)
        self.of(model).update((asked.key, answer) for asked, answer in answered)

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise EvalError(f"another process writes {self.path}; wait for it, or give another --out") from error

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._fd, whole)
            os.fsync(self._fd)
        fsync(self.path.parent)
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
            try:
                found = json.loads(line)
                key = (found["suite"], found["task"], found["sample"])
                answer = Answer(found["completion"], found["tokens"], found["ended"])
                self.of(found["model"])[key] = answer
            except (ValueError, KeyError, TypeError) as error:
                raise EvalError(
                    f"{self.path}, line {number}, is not a completion ({error!r}); remove that line to have it made again"
                ) from error


def _line(model: str, asked: Asked, answer: Answer) -> str:
    found: dict[str, Any] = {
        "model": model,
        "suite": asked.suite,
        "task": asked.task,
        "sample": asked.sample,
        "completion": answer.text,
        "tokens": answer.tokens,
        "ended": answer.ended,
    }
    return json.dumps(found) + "\n"  # ASCII: half a surrogate pair stays readable
