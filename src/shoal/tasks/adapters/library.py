"""A library of tasks in processes of its own: one lists its tasks and ends, others score completions.

Each library has a file in `far/` with `rows(options)`, `prepare(setting)` and `score(value)`. What passes between is JSON.
Invariants: rows follow from the options and the versions of library and environment. Those are in each row's metadata and so
in the digest of the task set. A completion is scored in a killable child, so it can hang or kill nothing. A score is the
library's, or a grader error.
Called by `reasoning_gym` and `verifiers`. Left out: isolation; a machine that installs a library trusts its code.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.sandbox import Budget
from shoal.tasks.rewards.killable.pool import ENVIRONMENT, Killable, grade_of
from shoal.tasks.task import Grade, Task, TasksNotFoundError

FAR = Path(__file__).parent / "far"
LISTING_S = 1800.0
CPU_S = 10.0  # the slowest known: 3 s, reasoning-gym's rubiks_cube for an answer that is not a sequence of moves
MEMORY_BYTES = 1 << 30
CONSIDERED = 20_000  # last characters of a completion


def _anything(_: Mapping[str, Any]) -> None:
    pass


@dataclass(frozen=True)
class Library:
    """Where a library's processes come from."""

    name: str  # of the module, and of the generator
    file: Path  # in far/
    extra: str  # of Shoal
    python: str = sys.executable
    check: Callable[[Mapping[str, Any]], None] = _anything  # raises for options or a setting that this machine refuses

    def rows(self, options: Mapping[str, Any]) -> list[dict[str, str]]:
        """Every task as a row: question, answer, metadata, and the library as its reward. Raises TasksNotFoundError."""
        self.check(options)
        try:
            done = subprocess.run(
                [self.python, "-P", str(FAR / "listing.py"), str(self.file)],
                input=json.dumps(dict(options)).encode(),
                capture_output=True,
                env=os.environ | ENVIRONMENT,
                timeout=LISTING_S,
                start_new_session=True,
            )
        except OSError as error:
            raise TasksNotFoundError(f"generator {self.name}: {self.python} does not start ({error})") from error
        except subprocess.TimeoutExpired as error:
            raise TasksNotFoundError(
                f"generator {self.name} is not ready after {LISTING_S:.0f} s; ask for fewer tasks with options.size"
            ) from error
        lines = done.stdout.decode().split("\n")[:-1]  # JSON of json.dumps has no other line ends
        ending = json.loads(lines.pop()) if lines and done.returncode == 0 else {"error": _last_words(done)}
        if ending.get("missing") == self.name:
            raise TasksNotFoundError(
                f"generator {self.name} needs a library that {self.python} does not have: pip install 'shoal[{self.extra}]'"
            )
        if "error" in ending:
            raise TasksNotFoundError(f"generator {self.name}: {ending['error']}")
        if ending.get("rows") != len(lines):
            raise TasksNotFoundError(f"generator {self.name} ends after {len(lines)} tasks without a word")
        return [{"reward": self.name} | json.loads(line) for line in lines]


@dataclass
class Scored:
    """The reward of a library's tasks: what the library gives. Its processes start with the first completion."""

    library: Library
    budget: Budget | None = None
    cpu_s: float = CPU_S
    pools: dict[str, Killable] = field(default_factory=dict)  # by setting; all tasks of a source share one

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        grades: dict[int, Grade] = {}
        by_setting: dict[str, list[int]] = {}
        metadata = [json.loads(task.metadata or "{}") for task in tasks]
        for n, (task, known) in enumerate(zip(tasks, metadata, strict=True)):
            if known.get("generator") == self.library.name:
                by_setting.setdefault(json.dumps(known["setting"]), []).append(n)
            else:
                text = f"task {task.id} is not from generator {self.library.name}, whose reward this is"
                grades[n] = Grade(0.0, "grader_error", text)
        for setting, of_setting in by_setting.items():
            values = [
                metadata[n] | {"question": tasks[n].question, "completion": completions[n][-CONSIDERED:]}
                for n in of_setting
            ]
            pool = self._pool(setting)
            results = pool.run(values)
            grades.update(zip(of_setting, (grade_of(one, pool, _answered) for one in results), strict=True))
        return [grades[n] for n in range(len(tasks))]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()

    def _pool(self, setting: str) -> Killable:
        if setting not in self.pools:
            self.library.check(json.loads(setting))
            self.pools[setting] = Killable(
                self.library.file,
                "score",
                cpu_s=self.cpu_s,
                memory_bytes=MEMORY_BYTES,
                arguments=[setting],
                python=self.library.python,
                budget=self.budget,
            )
        return self.pools[setting]


def _answered(value: dict[str, Any], repeatable: bool) -> Grade:
    return Grade(**value, repeatable=repeatable)


def _last_words(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return (
        f"its process ends with status {done.returncode} and no complete list: {lines[-1] if lines else 'no message'}"
    )
