"""One evaluation: run each model on each suite, and compare the results.

Invariants: a stopped evaluation can resume, but only with the settings recorded in the folder's `eval.json`. Every
figure has a 95 % interval.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.config.section import LOWEST_TEMPERATURE
from shoal.errors import ShoalError, UserError
from shoal.evals.harness import Endpoint, run
from shoal.evals.suites import Suite, grade, read_tasks, write_task
from shoal.files import write_file
from shoal.watch.estimates import Estimate, mean_over_questions, paired_difference, pass_at_k
from shoal.watch.figures import clean, percent

CONFIG, RESULTS = "eval.json", "results.json"


@dataclass(frozen=True)
class Contestant:
    """A model to evaluate. `open` serves the model; it is called only if runs are missing."""

    label: str
    facts: Mapping[str, Any]  # recorded in `eval.json`; an evaluation resumes only if they are unchanged
    open: Callable[[], AbstractContextManager[Endpoint]]


@dataclass(frozen=True)
class Score:
    """The results of one model on one suite."""

    model: str
    suite: str
    k: int
    avg: Estimate  # avg@k: the mean over tasks of each task's mean score over k completions
    pass_at: Mapping[int, Estimate]  # k -> pass@k
    values: Mapping[str, float]  # task -> mean score


@dataclass(frozen=True)
class Difference:
    """The avg@k of `after` minus that of `before`, over the same tasks."""

    suite: str
    before: str
    after: str
    avg: Estimate


def evaluate(
    contestants: Sequence[Contestant], suites: Sequence[Suite], folder: Path, console: Console, *, n: int = 0
) -> tuple[list[Score], list[Difference]]:
    """Return the scores, ordered by suite and then by model, and the differences from the first model.

    `n` is the number of tasks per suite; 0 means all. Raise ShoalError.
    """
    for suite in suites:
        if 0 < suite.temperature < LOWEST_TEMPERATURE:
            raise UserError(f"--temperature {suite.temperature:g}: use 0 (greedy), or at least {LOWEST_TEMPERATURE:g}")
        if suite.k > 1 and suite.temperature == 0:
            raise UserError(
                f"{suite.k} greedy completions of {suite.name} would be equal: add --temperature 0.6, or --k 1"
            )
    folder.mkdir(parents=True, exist_ok=True)
    check_settings(folder / CONFIG, contestants, suites, n)
    results = []
    for contestant in contestants:
        with ExitStack() as stack:
            endpoint: Endpoint | None = None
            for suite in suites:
                runs = []
                for number in range(suite.k):
                    out = folder / contestant.label.replace("/", "_") / f"{suite.name}-{number}"
                    if not out.is_dir():
                        endpoint = endpoint or stack.enter_context(contestant.open())
                    console.print(f"{contestant.label}, {suite.name}: run {number + 1} of {suite.k}", markup=False)
                    measure = code_scores if suite.prompt else scores
                    runs.append(measure(endpoint or Endpoint("", ""), suite, out, number, n))
                results.append(summarise(contestant.label, suite.name, runs))
    order = [suite.name for suite in suites]
    results.sort(key=lambda result: order.index(result.suite))
    return results, compare(results)


def scores(endpoint: Endpoint, suite: Suite, out: Path, seed: int, n: int) -> dict[str, float]:
    """Return the scores of one run, by task. Raise ShoalError."""
    samples = run(endpoint, suite, out, seed=seed, n=n)
    metric = suite.metric or samples[0]["metrics"][0]
    return {f"{sample['file'].rpartition('_')[0]}/{sample['doc_id']}": float(sample[metric]) for sample in samples}


def code_scores(endpoint: Endpoint, suite: Suite, out: Path, seed: int, n: int) -> dict[str, float]:
    """Return the scores of one run of a code suite, by task. Its programs run in the sandbox. Raise ShoalError.

    A grader failure ends the evaluation, because it must not count as a wrong answer.
    """
    tasks, task_folder = read_tasks(suite, n), out.parent / "tasks"
    write_task(suite, tasks, task_folder)
    samples = run(endpoint, suite, out, seed=seed, n=0, tasks=task_folder)
    answered = [tasks[int(sample["doc_id"])] for sample in samples]
    grades = grade(suite, answered, [str(sample["resps"][0][0] or "") for sample in samples])
    if failed := [pair for pair in zip(answered, grades, strict=True) if pair[1].outcome == "grader_error"]:
        task, first = failed[0]
        raise ShoalError(
            f"{len(failed)} programs of {suite.name} cannot be graded; the first is for {task.id}: {first.detail}"
        )
    return {task.id: result.score for task, result in zip(answered, grades, strict=True)}


def summarise(model: str, suite: str, runs: Sequence[Mapping[str, float]]) -> Score:
    k = len(runs)
    by_task = {task: [run_scores[task] for run_scores in runs] for task in runs[0]}
    correct = [sum(score >= 1 for score in each) for each in by_task.values()]
    values = {task: sum(each) / k for task, each in by_task.items()}
    powers = sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
    return Score(
        model=model,
        suite=suite,
        k=k,
        avg=mean_over_questions(list(values.values())),
        pass_at={j: mean_over_questions([pass_at_k(k, n_correct, j) for n_correct in correct]) for j in powers},
        values=values,
    )


def compare(results: Sequence[Score]) -> list[Difference]:
    """Compare every later model with the first, on each suite."""
    differences = []
    for suite in dict.fromkeys(result.suite for result in results):
        first, *others = [result for result in results if result.suite == suite]
        for other in others:
            pairs = [(first.values[task], value) for task, value in other.values.items() if task in first.values]
            before, after = [first_score for first_score, _ in pairs], [score for _, score in pairs]
            differences.append(Difference(suite, first.model, other.model, paired_difference(before, after)))
    return differences


def check_settings(path: Path, contestants: Sequence[Contestant], suites: Sequence[Suite], n: int) -> None:
    """Record the settings, or compare them with those recorded before. Models and suites may be added.

    Raise UserError, naming the first difference.
    """
    new: dict[str, Any] = {
        "models": {contestant.label: dict(contestant.facts) for contestant in contestants},
        "suites": {suite.name: {"n": n} | asdict(suite) for suite in suites},
    }
    try:
        old: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        old = {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable ({error}); give another --out") from error
    for kind in new:
        recorded = old.get(kind, {})
        for name, facts in new[kind].items():
            for fact, value in facts.items():
                if name in recorded and recorded[name].get(fact) != value:
                    raise UserError(
                        f"{path} was made with {fact} of {name} = {recorded[name].get(fact)!r:.80}, and it is now "
                        f"{value!r:.80}: give the same value to continue, or another --out for a new evaluation"
                    )
        new[kind] = recorded | new[kind]
    write_file(path, (json.dumps(new, indent=2) + "\n").encode())


# --- output ----------------------------------------------------------------------------------------------------------


def write_results(path: Path, results: Sequence[Score], differences: Sequence[Difference], command: str) -> None:
    """Write results.json. Raise OSError."""
    shown = [
        {name: value for name, value in asdict(result).items() if name != "values"} | {"tasks": len(result.values)}
        for result in results
    ]  # without the scores of single tasks
    contents = {"command": command, "results": shown, "differences": [asdict(difference) for difference in differences]}
    write_file(path, (json.dumps(contents, indent=2, allow_nan=False) + "\n").encode())


def table(results: Sequence[Score], differences: Sequence[Difference]) -> RenderableType:
    """Draw a table per suite with a column per model."""
    parts: list[RenderableType] = []
    for suite in dict.fromkeys(result.suite for result in results):
        own = [result for result in results if result.suite == suite]
        parts += [Text(f"{suite}: {len(own[0].values)} tasks, k = {own[0].k}", style="bold"), _columns(own)]
        parts += [Text(sentence(difference)) for difference in differences if difference.suite == suite]
        parts.append(Text())
    methods = ", ".join(sorted({result.avg.method for result in results}))
    parts.append(Text(f"95 % intervals in brackets ({methods})."))
    return Group(*parts)


def _columns(results: Sequence[Score]) -> Table:
    shown = Table(box=None, padding=(0, 2), pad_edge=False, show_header=True, header_style="")
    shown.add_column("", no_wrap=True)
    for result in results:
        shown.add_column(Text(clean(result.model), overflow="fold"), no_wrap=True)
    shown.add_row(f"avg@{results[0].k}", *[_interval(result.avg) for result in results], style="bold")
    for j in sorted(results[0].pass_at)[1:]:  # pass@1 equals avg@k if scores are 0 or 1
        shown.add_row(f"pass@{j}", *[_interval(result.pass_at[j]) for result in results])
    return shown


def sentence(difference: Difference) -> str:
    """Return a sentence such as `after minus before: +4.0 points [+1.2, +6.9], paired over the same tasks`."""
    low, high = difference.avg.low, difference.avg.high
    verdict = "" if low > 0 or high < 0 else "; the interval contains 0"
    return (
        f"{clean(difference.after)} minus {clean(difference.before)}: {100 * difference.avg.mean:+.1f} "
        f"points [{100 * low:+.1f}, {100 * high:+.1f}], paired over the same tasks{verdict}"
    )


def _interval(estimate: Estimate) -> str:
    return f"{percent(estimate.mean)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
