"""An evaluation from start to end: tasks, completions, grades, results.

    read the suites' tasks -> write down what is evaluated -> for each model: complete what is not yet complete
    -> grade everything -> results

Invariant: the folder's `eval.json` says what is evaluated, and no completion made under other settings is ever mixed in.
Grading starts over each time, from `completions.jsonl` alone. So a killed evaluation continues where it was, with the same
result.
Called by `shoal eval`. Left out: several processes on one evaluation.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.config.tasks import TaskSection
from shoal.evals import suites as suites_module
from shoal.evals.completions import Answer, Asked, CompletionLog, EvalUsageError
from shoal.evals.results import Difference, Graded, Result, compare, summarise
from shoal.evals.samplers import Sampler, Sampling
from shoal.evals.suites import Suite
from shoal.files import write_file
from shoal.tasks.rewards.graders import Graders
from shoal.tasks.task import Task
from shoal.watch.terminal.progress import Progress

CONFIG, COMPLETIONS, GRADES, RESULTS = "eval.json", "completions.jsonl", "grades.jsonl", "results.json"
GRADE_AT_ONCE = 64
SOURCE = "source"  # where tasks were read; what they are is in their digest, so they may be read elsewhere


@dataclass(frozen=True)
class Contestant:
    """A model to evaluate. `open` loads it; that is called only if completions are missing."""

    label: str
    facts: Mapping[str, Any]  # recorded; completions of a model with other facts are not continued
    open: Callable[[], Sampler]


@dataclass(frozen=True)
class Entry:
    """A suite as it is evaluated here."""

    suite: Suite
    tasks: Sequence[Task]
    k: int
    sampling: Sampling
    path: str = ""

    def facts(self) -> dict[str, Any]:
        return {
            SOURCE: self.path or f"{self.suite.hub}@{self.suite.revision or 'newest'}",
            "tasks": len(self.tasks),
            "digest": suites_module.digest(self.tasks),
            "prompt": self.suite.prompt,
            "reward": self.suite.reward,
            "k": self.k,
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_tokens,
        }


def evaluate(
    contestants: Sequence[Contestant], entries: Sequence[Entry], folder: Path, console: Console, *, seed: int = 0
) -> tuple[list[Result], list[Difference]]:
    """Results in the order of suites, then models. Raises EvalUsageError, ShoalError."""
    for entry in entries:
        if entry.k > 1 and entry.sampling.temperature == 0:
            raise EvalUsageError(
                f"{entry.k} greedy completions of {entry.suite.name} would be equal: add --temperature 0.6, or --k 1"
            )
    check_graders(entries)
    with CompletionLog(folder / COMPLETIONS) as log:  # first: its lock keeps a second evaluation out
        write_down(folder / CONFIG, contestants, entries, seed)
        for contestant in contestants:
            complete(contestant, entries, log, console, seed)
        results = []
        graded_lines: list[str] = []
        for entry in entries:
            for contestant in contestants:
                groups = grade(contestant.label, entry, log, console, seed)
                results.append(summarise(contestant.label, entry.suite.name, groups))
                graded_lines += _lines(contestant.label, entry, groups)
        write_file(folder / GRADES, "".join(graded_lines).encode())
    return results, compare(results)


def check_graders(entries: Sequence[Entry]) -> None:
    """Grade an empty completion of each suite, so that what a grader lacks is known before hours of sampling."""
    for entry in entries:
        with graders_of(entry) as graders:
            graders.grade(entry.tasks[:1], [""])


def graders_of(entry: Entry) -> Graders:
    source, _ = suites_module.sources(entry.suite, entry.path)[0]
    return Graders(TaskSection(sources=[source]))


def asked_of(entry: Entry, seed: int) -> list[Asked]:
    """Every completion of a suite, task by task."""
    return [
        Asked(entry.suite.name, task.id, sample, entry.suite.prompt.replace("{question}", task.question), seed)
        for task in entry.tasks
        for sample in range(entry.k)
    ]


def complete(contestant: Contestant, entries: Sequence[Entry], log: CompletionLog, console: Console, seed: int) -> None:
    """Make the completions that the log does not hold yet."""
    known = log.of(contestant.label)
    sampler: Sampler | None = None
    for entry in entries:
        asked = asked_of(entry, seed)
        held = sum(one.key in known for one in asked)
        if held == len(asked):
            continue
        sampler = sampler or contestant.open()
        with Progress(console, f"{contestant.label}, {entry.suite.name}: completions", len(asked)) as progress:
            progress(held)

            def done(answered: Sequence[tuple[Asked, Answer]], progress: Progress = progress) -> None:
                new = sum(one.key not in known for one, _ in answered)
                log.append(contestant.label, answered)
                progress.add(new)

            sampler.answer(asked, entry.sampling, known, done)


def grade(label: str, entry: Entry, log: CompletionLog, console: Console, seed: int) -> list[list[Graded]]:
    """The graded completions of each task, in the order of the tasks."""
    asked, known = asked_of(entry, seed), log.of(label)
    by_id = {task.id: task for task in entry.tasks}
    graded: list[Graded] = []
    with (
        graders_of(entry) as graders,
        Progress(console, f"{label}, {entry.suite.name}: grades", len(asked)) as progress,
    ):
        progress(0)
        for start in range(0, len(asked), GRADE_AT_ONCE):
            chunk = asked[start : start + GRADE_AT_ONCE]
            answers = [known[one.key] for one in chunk]
            grades = graders.grade([by_id[one.task] for one in chunk], [answer.text for answer in answers])
            graded += zip(answers, grades, strict=True)
            progress.add(len(chunk))
    return [graded[start : start + entry.k] for start in range(0, len(graded), entry.k)]


def write_down(path: Path, contestants: Sequence[Contestant], entries: Sequence[Entry], seed: int) -> None:
    """Record what is evaluated, or check that it is what the folder was made with. Models and suites may be added.

    Raises EvalUsageError, naming the first difference.
    """
    new: dict[str, Any] = {
        "seed": seed,
        "models": {contestant.label: dict(contestant.facts) for contestant in contestants},
        "suites": {entry.suite.name: entry.facts() for entry in entries},
    }
    old = recorded(path)
    if old.get("seed", seed) != seed:
        raise EvalUsageError(_differs(path, "seed", old["seed"], seed))
    for kind in ("models", "suites"):
        held = old.get(kind, {})
        for name, facts in new[kind].items():
            for fact, value in facts.items() if name in held else ():
                if fact != SOURCE and held[name].get(fact) != value:
                    raise EvalUsageError(_differs(path, f"{fact} of {name}", held[name].get(fact), value))
        new[kind] = held | new[kind]
    if new != old:
        write_file(path, (json.dumps(new, indent=2) + "\n").encode())


def recorded(path: Path) -> dict[str, Any]:
    """What an evaluation's folder was made with; empty if there is none. Raises EvalUsageError."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EvalUsageError(f"{path} is not readable ({error}); give another --out") from error
    return found


def _differs(path: Path, what: str, old: object, new: object) -> str:
    return (
        f"{path} was made with {what} = {_short(old)}, and this is {_short(new)}: give the same to continue, or another "
        "--out for a new evaluation"
    )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lines(label: str, entry: Entry, groups: Sequence[Sequence[Graded]]) -> list[str]:
    return [
        json.dumps(
            {
                "model": label,
                "suite": entry.suite.name,
                "task": task.id,
                "sample": sample,
                "score": grade.score,
                "outcome": grade.outcome,
                "tier": grade.tier,
                "repeatable": grade.repeatable,
                "detail": grade.detail,
            }
        )
        + "\n"
        for task, group in zip(entry.tasks, groups, strict=True)
        for sample, (_, grade) in enumerate(group)
    ]
