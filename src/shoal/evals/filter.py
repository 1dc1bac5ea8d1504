"""The offline filter: it measures a model's pass rates on training tasks, and keeps the tasks within a band.

    results.jsonl       k graded completions per task: one line per task, in the order of the task set
    manifest.json       the tasks without a grader error whose pass rate lies in the band, bounds included

The results of each batch of tasks are appended and fsynced. In a config, a source's `keep` names the manifest.
Invariants: synced results are never computed again. A resumed run writes the same bytes as an uninterrupted run.
Therefore a run resumes after the last complete batch, and only with its original settings (`settings.json`). The
manifest depends only on the results, the band and the settings, so another band needs no new completions.
Paper: the offline filter of INTELLECT-2 (arXiv 2505.07291), which keeps tasks with a pass@8 of 12.5 % to 50 %.
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

from shoal import tasks
from shoal.config import Config
from shoal.config.tasks import GRADER_ERRORS
from shoal.engine.protocol import Completion, Engine
from shoal.errors import ShoalError, disk_is_full
from shoal.evals.examiner import Examiner
from shoal.files import read_json, write_file
from shoal.model.load import weights_digest
from shoal.model.sampling import rollout_seed
from shoal.model.sources import check_max_tokens
from shoal.model.turns import model_tokens
from shoal.protocol.messages import MILLION

RESULTS, SETTINGS = "results.jsonl", "settings.json"
MIN_GRADED = 64  # the grader's error rate is checked once there are this many completions
ROWS = 128  # completions decoded together; more are faster, because each step reads all weights once for all of them
FORMAT = "shoal-filter-1"
MANIFEST = "manifest.json"
MAX_BINS = 16


@dataclass(frozen=True)
class PassRate:
    """The scores of one task's k completions."""

    task: str
    source: str
    n: int  # completions
    score: int  # sum of the scores, in millionths
    tokens: int  # sampled tokens
    # completions by outcome
    graded: int
    wrong_format: int
    grader_error: int


class PassRates:
    """Measures training tasks of `config` (the first `n`, or all) with the model in `folder`. Results go to `out`."""

    def __init__(self, config: Config, folder: Path, out: Path, k: int, n: int | None = None) -> None:
        check_max_tokens(folder, config.sampling.max_tokens)
        self.config = config.model_copy(update={"tasks": _without_filters(config.tasks)})
        self.folder, self.out, self.k = folder, out, k
        self.tasks = tasks.load(self.config.tasks)
        self.total = min(n or len(self.tasks.train), len(self.tasks.train))
        self.batch = max(1, ROWS // k)  # tasks per batch
        self.settings = self._settings()
        self.error = ""  # the newest grader error

    def measure(self, engine: Engine, stop: threading.Event, say: Callable[[int], None]) -> list[PassRate] | None:
        """Return every task's result, or None if `stop` was set before the end.

        `say` is called with the number of tasks done, at the start and after each batch. Raise ShoalError if the
        results in `out` were made with other settings, the grader fails, or the disk is full.
        """
        try:
            with self._lock_results() as file:
                results = self._read_complete(file)
                say(len(results))
                if len(results) < self.total:
                    self._continue(file, results, engine, stop, say)
                return results if len(results) == self.total else None
        except OSError as error:
            if not disk_is_full(error):
                raise
            raise ShoalError(
                f"the disk of {self.out} is full: free space there, then repeat the command to continue"
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
                new = self._batch(examiner, range(len(results), min(len(results) + self.batch, self.total)))
                append(file, new)
                results += new
                self._check_grader(results)
                say(len(results))

    def _batch(self, examiner: Examiner, numbers: range) -> list[PassRate]:
        chosen = [self.tasks.train[number] for number in numbers]
        seeds = [[self._seed(number, completion) for completion in range(self.k)] for number in numbers]
        groups, grades = examiner.ask(chosen, numbers.start, seeds, self.config.sampling.temperature)
        failed = [grade.detail for group in grades for grade in group if grade.outcome == "grader_error"]
        self.error = failed[-1] if failed else self.error
        return [_result(*row) for row in zip(chosen, groups, grades, strict=True)]

    def _seed(self, number: int, completion: int) -> int:
        return rollout_seed(f"shoal/filter/{self.config.run.seed}", 0, "", 0, number * self.k + completion)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that determine the results and must not change on resume."""
        prompts_and_rewards = json.dumps(
            [self.config.tasks.system, self.config.tasks.prompt, self.config.sampling.max_turns]
            + [self.config.tasks.length_targets]
            + [[source.reward, source.environment] for source in self.config.tasks.sources]
        )
        return {
            "digest": self.tasks.digest,
            "model": self.config.model.name,
            "weights": weights_digest(self.folder),
            "k": self.k,
            "temperature": self.config.sampling.temperature,
            "max_tokens": self.config.sampling.max_tokens,
            "seed": self.config.run.seed,
            "prompts_and_rewards": sha256(prompts_and_rewards.encode()).hexdigest(),
        }

    @contextmanager
    def _lock_results(self) -> Iterator[BinaryIO]:
        """Open and lock the results file, and check that the settings of its results are unchanged."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / RESULTS).open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ShoalError(
                    f"another process writes to {self.out}: wait for it, or choose another --out"
                ) from error
            path = self.out / SETTINGS
            if path.exists():
                self._check_settings(read_json(path))
            else:
                write_file(path, (json.dumps(self.settings, indent=2) + "\n").encode())
            yield file

    def _check_settings(self, before: dict[str, Any]) -> None:
        changed = [name for name in self.settings if before.get(name) != self.settings[name]]
        if changed:
            name = changed[0]
            what = "the tasks (their digest)" if name == "digest" else name
            raise ShoalError(
                f"{self.out} has results with another setting: {what} was {before.get(name)} and is now "
                f"{self.settings[name]}; restore it to continue, or choose another --out"
            )

    def _read_complete(self, file: BinaryIO) -> list[PassRate]:
        """Return the results up to the last complete batch, and truncate the file there."""
        file.seek(0)
        lines = file.read().split(b"\n")[:-1][: self.total]
        complete = len(lines) if len(lines) == self.total else len(lines) // self.batch * self.batch
        lines = lines[:complete]
        try:
            results = [PassRate(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise ShoalError(f"{self.out / RESULTS} is damaged ({error}): choose another --out") from error
        if len(results) < self.total:
            file.truncate(sum(len(line) + 1 for line in lines))
        return results

    def _check_grader(self, results: Sequence[PassRate]) -> None:
        errors, n = sum(result.grader_error for result in results), sum(result.n for result in results)
        if n >= MIN_GRADED and errors > GRADER_ERRORS * n:
            raise ShoalError(
                f"the grader failed for {errors} of {n} completions, more than {GRADER_ERRORS:.0%} (last: "
                f"{self.error[:200]}): fix the reward or the tasks, then choose another --out"
            )


def append(file: BinaryIO, results: Sequence[PassRate]) -> None:
    """Append results and fsync. Raise OSError."""
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
        tokens=sum(model_tokens(completion.turns, len(completion.tokens)) for completion in group),
        graded=outcomes.count("graded"),
        wrong_format=outcomes.count("wrong_format"),
        grader_error=outcomes.count("grader_error"),
    )


def _without_filters(section: Any) -> Any:
    """Return the section without `keep`, so that the results cover all tasks and filtering can be repeated."""
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
        """Parse `0.125:0.5` or `1/8:1/2`. Raise ValueError."""
        try:
            low, high = map(Fraction, text.split(":"))
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{text!r} is not a band of pass rates: write LOW:HIGH, as in 0.125:0.5") from error
        if not 0 <= low <= high <= 1:
            raise ValueError(f"{text!r} is not a band of pass rates: 0 <= LOW <= HIGH <= 1 must hold")
        return cls(low, high)

    def contains(self, result: PassRate) -> bool:
        return not result.grader_error and self.low <= Fraction(result.score, result.n * MILLION) <= self.high


def write_filter(out: Path, results: Sequence[PassRate], band: Band, settings: Mapping[str, Any]) -> list[PassRate]:
    """Write the manifest and return the kept results. Raise OSError, or ShoalError if none are kept."""
    kept = [result for result in results if band.contains(result)]
    if not kept:
        (out / MANIFEST).unlink(missing_ok=True)  # may be left from another band
        bins = ", ".join(f"{label}: {count}" for label, count in histogram(results).items() if count)
        raise ShoalError(
            f"no task of {len(results)} has a pass rate from {float(band.low):g} to {float(band.high):g}; tasks by pass "
            f"rate: {bins}; choose another --band (the completions in {out} are kept), other tasks, or another model"
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
    total_by_source = Counter(result.source for result in results)
    kept_by_source = Counter(result.source for result in kept)
    return {
        "tasks": len(results),
        "kept": len(kept),
        "below": below,
        "above": len(results) - len(kept) - below - failed,
        "grader_error": failed,
        "sources": {source: {"tasks": n, "kept": kept_by_source[source]} for source, n in total_by_source.items()},
    }


def histogram(results: Sequence[PassRate]) -> dict[str, int]:
    """Count tasks by pass rate, and include empty bins.

    If k <= MAX_BINS, there is a bin per number of correct completions, and a partial score counts in the nearest bin.
    Otherwise, each bin covers a tenth.
    """
    k = max((result.n for result in results), default=1)
    if k <= MAX_BINS:
        bins = Counter(round(Fraction(result.score * k, result.n * MILLION)) for result in results)
        return {f"{correct}/{k}": bins[correct] for correct in range(k + 1)}
    bins = Counter(min(int(Fraction(result.score * 10, result.n * MILLION)), 9) for result in results)
    return {f"{low / 10:.1f} to {(low + 1) / 10:.1f}": bins[low] for low in range(10)}
