"""The offline filter: pass rates of training tasks under one model, and the tasks worth training on.

    results.jsonl       k sampled completions of each task, graded: one task a line, in the order of the task set
    manifest.json       the tasks whose pass rate lies in the band, ends included, without a grader error

A batch of tasks is generated, graded, appended and synced. A config names the manifest as `keep` of a source.
Invariants: whatever happens to the process, what was synced is not computed again, and the finished file is the same bytes
as one that was never interrupted. So a file is continued only from the end of a whole batch, and only with settings
(`settings.json`) under which it began. The manifest follows from the results and the band alone, so another band needs
no new completions.
Paper: INTELLECT-2 (arXiv 2505.07291), offline filtering: pass@8 of 12.5 % to 50 %.
"""

import fcntl
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from shoal import tasks
from shoal.config import Config
from shoal.config.tasks import GRADER_ERRORS
from shoal.engine.protocol import Completion, Engine
from shoal.errors import ShoalError, disk_is_full
from shoal.evals.examiner import Examiner
from shoal.files import write_file
from shoal.model.sampling import rollout_seed
from shoal.model.sources import check_max_tokens
from shoal.model.turns import model_tokens
from shoal.protocol.messages import MILLION

RESULTS, SETTINGS = "results.jsonl", "settings.json"
LEAST_GRADED = 64  # completions before grader errors are judged
ROWS = 128  # completions decoded together: many, because decoding reads all weights once a step for however many rows
FORMAT = "shoal-filter-1"
MANIFEST = "manifest.json"
MOST_BINS = 16


@dataclass(frozen=True)
class PassRate:
    """What the k completions of one task scored."""

    task: str
    source: str
    n: int  # completions
    score: int  # summed, in millionths
    tokens: int
    graded: int
    wrong_format: int
    grader_error: int


class PassRates:
    """Measures the first `n` training tasks (None: all) of `config` with the model in `folder`, into `out`."""

    def __init__(self, config: Config, folder: Path, out: Path, k: int, n: int | None = None) -> None:
        check_max_tokens(folder, config.sampling.max_tokens)
        self.config = config.model_copy(update={"tasks": _all_of(config.tasks)})
        self.folder, self.out, self.k = folder, out, k
        self.tasks = tasks.load(self.config.tasks)
        self.total = min(n or len(self.tasks.train), len(self.tasks.train))
        self.batch = max(1, ROWS // k)  # tasks decoded together
        self.settings = self._settings()
        self.error = ""  # of the newest grader error

    def measure(self, engine: Engine, stop: threading.Event, say: Callable[[int], None]) -> list[PassRate] | None:
        """Every task's result, or None if `stop` came first. `say` gets how many are done, at first and per batch.

        Raises ShoalError: other settings than those of the results in `out`, a grader that fails, a full disk.
        """
        try:
            with self._opened() as file:
                results = self._kept(file)
                say(len(results))
                if len(results) < self.total:
                    self._continue(file, results, engine, stop, say)
                return results if len(results) == self.total else None
        except OSError as error:
            if not disk_is_full(error):
                raise
            raise ShoalError(
                f"the disk of {self.out} is full: free space there, then repeat the command: it continues where it was"
            ) from error

    def _continue(
        self,
        file: BinaryIO,
        results: list[PassRate],
        engine: Engine,
        stop: threading.Event,
        say: Callable[[int], None],
    ) -> None:
        with Examiner(self.config, self.tasks.files) as examiner:
            examiner.load(engine, self.folder)
            while len(results) < self.total and not stop.is_set():
                found = self._batch(examiner, range(len(results), min(len(results) + self.batch, self.total)))
                append(file, found)
                results += found
                self._check_grader(results)
                say(len(results))

    def _batch(self, examiner: Examiner, numbers: range) -> list[PassRate]:
        chosen = [self.tasks.train[number] for number in numbers]
        seeds = [[self._seed(number, completion) for completion in range(self.k)] for number in numbers]
        groups, grades = examiner.ask(chosen, numbers.start, seeds, self.config.sampling.temperature)
        failed = [one.detail for of_task in grades for one in of_task if one.outcome == "grader_error"]
        self.error = failed[-1] if failed else self.error
        return [_result(*one) for one in zip(chosen, groups, grades, strict=True)]

    def _seed(self, number: int, completion: int) -> int:
        return rollout_seed(f"shoal/filter/{self.config.run.seed}", 0, "", 0, number * self.k + completion)

    def _settings(self) -> dict[str, Any]:
        """What the results depend on, and must not change when they are continued."""
        weights = blake3()
        for path in sorted(self.folder.glob("*.safetensors")):
            weights.update_mmap(path)
        texts = json.dumps(
            [self.config.tasks.system, self.config.tasks.prompt, self.config.sampling.max_turns]
            + [self.config.tasks.length_targets]
            + [[source.reward, source.environment] for source in self.config.tasks.sources]
        )
        return {
            "digest": self.tasks.digest,
            "model": self.config.model.name,
            "weights": weights.hexdigest(),
            "k": self.k,
            "temperature": self.config.sampling.temperature,
            "max_tokens": self.config.sampling.max_tokens,
            "seed": self.config.run.seed,
            "prompts_and_rewards": sha256(texts.encode()).hexdigest(),
        }

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """The results file, for this process alone, of these settings."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / RESULTS).open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ShoalError(f"another process fills {self.out}: wait for it, or choose another --out") from error
            path = self.out / SETTINGS
            if path.exists():
                self._check_settings(json.loads(path.read_text()))
            else:
                write_file(path, (json.dumps(self.settings, indent=2) + "\n").encode())
            yield file

    def _check_settings(self, before: dict[str, Any]) -> None:
        changed = [name for name in self.settings if before.get(name) != self.settings[name]]
        if changed:
            name = changed[0]
            what = "the tasks (their digest)" if name == "digest" else name
            raise ShoalError(
                f"{self.out} holds results with another setting: {what} was {before.get(name)} and is now "
                f"{self.settings[name]}; restore it to continue, or choose another --out"
            )

    def _kept(self, file: BinaryIO) -> list[PassRate]:
        """The results that are there, up to the last whole batch; what is behind it is cut off."""
        file.seek(0)
        lines = file.read().split(b"\n")[:-1][: self.total]
        whole = len(lines) if len(lines) == self.total else len(lines) // self.batch * self.batch
        lines = lines[:whole]
        try:
            results = [PassRate(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise ShoalError(f"{self.out / RESULTS} is damaged ({error}): choose another --out") from error
        if len(results) < self.total:
            file.truncate(sum(len(line) + 1 for line in lines))
        return results

    def _check_grader(self, results: Sequence[PassRate]) -> None:
        errors, n = sum(one.grader_error for one in results), sum(one.n for one in results)
        if n >= LEAST_GRADED and errors > GRADER_ERRORS * n:
            raise ShoalError(
                f"the grader failed for {errors} of {n} completions, more than {GRADER_ERRORS:.0%} (last: "
                f"{self.error[:200]}): fix the reward or the tasks, then choose another --out"
            )


def append(file: BinaryIO, results: Sequence[PassRate]) -> None:
    """Raises OSError. Returns once the lines are on disk."""
    file.write(b"".join(json.dumps(asdict(result)).encode() + b"\n" for result in results))
    file.flush()
    os.fsync(file.fileno())


def _result(task: tasks.Task, group: Sequence[Completion], grades: Sequence[tasks.Grade]) -> PassRate:
    outcomes = [grade.outcome for grade in grades]
    return PassRate(
        task=task.id,
        source=task.source,
        n=len(grades),
        score=sum(round(grade.score * MILLION) for grade in grades),
        tokens=sum(model_tokens(one.turns, len(one.tokens)) for one in group),
        graded=outcomes.count("graded"),
        wrong_format=outcomes.count("wrong_format"),
        grader_error=outcomes.count("grader_error"),
    )


def _all_of(section: Any) -> Any:
    """The section without earlier filters: the results are of all tasks, so that a filter can be drawn again."""
    if not any(source.keep for source in section.sources):
        return section
    sources = [source.model_copy(update={"keep": ""}) for source in section.sources]
    return section.model_copy(update={"sources": sources, "digest": ""})


# --- the filter -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Pass rates from `low` to `high`, both included."""

    low: Fraction
    high: Fraction

    @classmethod
    def parse(cls, text: str) -> "Band":
        """Of `0.125:0.5` or `1/8:1/2`. Raises ValueError."""
        parts = text.split(":")
        try:
            low, high = (Fraction(part) for part in parts)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{text!r} is not a band of pass rates: write LOW:HIGH, as in 0.125:0.5") from error
        if not 0 <= low <= high <= 1:
            raise ValueError(f"{text!r} is not a band of pass rates: 0 <= LOW <= HIGH <= 1 must hold")
        return cls(low, high)

    def holds(self, result: PassRate) -> bool:
        return not result.grader_error and self.low <= Fraction(result.score, result.n * MILLION) <= self.high


def write_filter(out: Path, results: Sequence[PassRate], band: Band, settings: Mapping[str, Any]) -> list[PassRate]:
    """Write the manifest. Returns the results of the kept tasks. Raises ShoalError if there are none, OSError."""
    kept = [result for result in results if band.holds(result)]
    if not kept:
        (out / MANIFEST).unlink(missing_ok=True)  # of another band
        found = ", ".join(f"{label}: {count}" for label, count in histogram(results).items() if count)
        raise ShoalError(
            f"no task of {len(results)} has a pass rate from {float(band.low):g} to {float(band.high):g}; tasks by pass "
            f"rate: {found}; choose another --band (the completions in {out} are kept), other tasks, or another model"
        )
    manifest = {
        "format": FORMAT,
        **settings,
        "band": [float(band.low), float(band.high)],
        "counts": counts(results, kept, band),
        "kept": [result.task for result in kept],
    }
    write_file(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return kept


def counts(results: Sequence[PassRate], kept: Sequence[PassRate], band: Band) -> dict[str, Any]:
    failed = sum(result.grader_error > 0 for result in results)
    below = sum(not result.grader_error and Fraction(result.score, result.n * MILLION) < band.low for result in results)
    all_of, kept_of = Counter(one.source for one in results), Counter(one.source for one in kept)
    return {
        "tasks": len(results),
        "kept": len(kept),
        "below": below,
        "above": len(results) - len(kept) - below - failed,
        "grader_error": failed,
        "sources": {source: {"tasks": all_of[source], "kept": kept_of[source]} for source in all_of},
    }


def histogram(results: Sequence[PassRate]) -> dict[str, int]:
    """Tasks by pass rate: by completions right if there are few, else by tenths. Empty bins included.

    A task with partial scores counts in the nearest bin.
    """
    k = max((result.n for result in results), default=1)
    if k <= MOST_BINS:
        found = Counter(round(Fraction(one.score * k, one.n * MILLION)) for one in results)
        return {f"{right}/{k}": found[right] for right in range(k + 1)}
    found = Counter(min(int(Fraction(one.score * 10, one.n * MILLION)), 9) for one in results)
    return {f"{low / 10:.1f} to {(low + 1) / 10:.1f}": found[low] for low in range(10)}
