"""An evaluation from start to end: suites, runs of each model, results side by side.

Invariant: the folder's `eval.json` says what is evaluated, and no completion made under other settings is ever mixed in. So
an evaluation that was stopped continues where it was. Every figure stands with its 95 % interval.
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

from shoal.errors import ShoalError, UserError
from shoal.evals.harness import Endpoint, run
from shoal.evals.suites import Suite, grade, read_tasks, write_task
from shoal.files import write_file
from shoal.watch.estimates import Estimate, mean_over_questions, paired_difference, pass_at_k
from shoal.watch.figures import clean, percent

CONFIG, RESULTS = "eval.json", "results.json"


@dataclass(frozen=True)
class Contestant:
    """A model to evaluate. `open` serves it; that is called only if runs are missing."""

    label: str
    facts: Mapping[str, Any]  # recorded; runs of a model with other facts are not continued
    open: Callable[[], AbstractContextManager[Endpoint]]


@dataclass(frozen=True)
class Score:
    """One model on one suite."""

    model: str
    suite: str
    k: int
    avg: Estimate  # of the mean score over tasks, each being the mean over its k completions
    pass_at: Mapping[int, Estimate]  # by k
    values: Mapping[str, float]  # mean score by task


@dataclass(frozen=True)
class Difference:
    """avg@k of `after` less that of `before`, over the same tasks."""

    suite: str
    before: str
    after: str
    avg: Estimate


def evaluate(
    contestants: Sequence[Contestant], suites: Sequence[Suite], folder: Path, console: Console, *, n: int = 0
) -> tuple[list[Score], list[Difference]]:
    """Return the results in the order of suites, then models. `n`: tasks of each suite; 0: all.

    Raises ShoalError.
    """
    for suite in suites:
        if suite.k > 1 and suite.temperature == 0:
            raise UserError(
                f"{suite.k} greedy completions of {suite.name} would be equal: add --temperature 0.6, or --k 1"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_down(folder / CONFIG, contestants, suites, n)
    results = []
    for contestant in contestants:
        with ExitStack() as open_one:
            endpoint: Endpoint | None = None
            for suite in suites:
                runs = []
                for number in range(suite.k):
                    out = folder / contestant.label.replace("/", "_") / f"{suite.name}-{number}"
                    if not out.is_dir():
                        endpoint = endpoint or open_one.enter_context(contestant.open())
                    console.print(f"{contestant.label}, {suite.name}: run {number + 1} of {suite.k}", markup=False)
                    measure = code_scores if suite.prompt else scores
                    runs.append(measure(endpoint or Endpoint("", ""), suite, out, number, n))
                results.append(summarise(contestant.label, suite.name, runs))
    order = [suite.name for suite in suites]
    results.sort(key=lambda result: order.index(result.suite))
    return results, compare(results)


def scores(endpoint: Endpoint, suite: Suite, out: Path, seed: int, n: int) -> dict[str, float]:
    """Return each task's score in one run, by the task's name. Raises ShoalError."""
    samples = run(endpoint, suite, out, seed=seed, n=n)
    metric = suite.metric or samples[0]["metrics"][0]
    return {f"{one['file'].rpartition('_')[0]}/{one['doc_id']}": float(one[metric]) for one in samples}


def code_scores(endpoint: Endpoint, suite: Suite, out: Path, seed: int, n: int) -> dict[str, float]:
    """Return the same of a code suite, whose programs run in the sandbox. Raises ShoalError.

    A program that this machine cannot grade would count as a wrong one, so it ends the evaluation.
    """
    tasks, written = read_tasks(suite, n), out.parent / "tasks"
    write_task(suite, tasks, written)
    samples = run(endpoint, suite, out, seed=seed, n=0, tasks=written)
    asked = [tasks[int(one["doc_id"])] for one in samples]
    grades = grade(suite, asked, [str(one["resps"][0][0] or "") for one in samples])
    if failed := [(task, one) for task, one in zip(asked, grades, strict=True) if one.outcome == "grader_error"]:
        task, first = failed[0]
        raise ShoalError(
            f"{len(failed)} programs of {suite.name} cannot be graded; the first, of {task.id}: {first.detail}"
        )
    return {task.id: one.score for task, one in zip(asked, grades, strict=True)}


def summarise(model: str, suite: str, runs: Sequence[Mapping[str, float]]) -> Score:
    k = len(runs)
    by_task = {task: [found[task] for found in runs] for task in runs[0]}
    correct = [sum(score >= 1 for score in each) for each in by_task.values()]
    values = {task: sum(each) / k for task, each in by_task.items()}
    powers = sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
    return Score(
        model=model,
        suite=suite,
        k=k,
        avg=mean_over_questions(list(values.values())),
        pass_at={j: mean_over_questions([pass_at_k(k, right, j) for right in correct]) for j in powers},
        values=values,
    )


def compare(results: Sequence[Score]) -> list[Difference]:
    """Every later model with the first one, on each suite."""
    found = []
    for suite in dict.fromkeys(result.suite for result in results):
        first, *others = [result for result in results if result.suite == suite]
        for other in others:
            pairs = [(first.values[task], value) for task, value in other.values.items() if task in first.values]
            before, after = [one for one, _ in pairs], [one for _, one in pairs]
            found.append(Difference(suite, first.model, other.model, paired_difference(before, after)))
    return found


def write_down(path: Path, contestants: Sequence[Contestant], suites: Sequence[Suite], n: int) -> None:
    """Record what is evaluated, or check that it is what the folder was made with. Models and suites may be added.

    Raises UserError, naming the first difference.
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
        held = old.get(kind, {})
        for name, facts in new[kind].items():
            for fact, value in facts.items():
                if name in held and held[name].get(fact) != value:
                    raise UserError(
                        f"{path} was made with {fact} of {name} = {held[name].get(fact)!r:.80}, and this is {value!r:.80}: "
                        "give the same to continue, or another --out for a new evaluation"
                    )
        new[kind] = held | new[kind]
    write_file(path, (json.dumps(new, indent=2) + "\n").encode())


# --- what is shown ---------------------------------------------------------------------------------------------------


def write_results(path: Path, results: Sequence[Score], differences: Sequence[Difference], command: str) -> None:
    """Raises OSError."""
    shown = [
        {name: value for name, value in asdict(result).items() if name != "values"} | {"tasks": len(result.values)}
        for result in results
    ]
    found = {"command": command, "results": shown, "differences": [asdict(difference) for difference in differences]}
    write_file(path, (json.dumps(found, indent=2, allow_nan=False) + "\n").encode())


def table(results: Sequence[Score], differences: Sequence[Difference]) -> RenderableType:
    """A table per suite, a column per model. 95 % intervals in brackets."""
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
    for j in sorted(results[0].pass_at)[1:]:  # pass@1 is avg@k wherever scores are 0 or 1
        shown.add_row(f"pass@{j}", *[_interval(result.pass_at[j]) for result in results])
    return shown


def sentence(difference: Difference) -> str:
    """`after less before: +4.0 points [+1.2, +6.9], paired over the same tasks`."""
    low, high = difference.avg.low, difference.avg.high
    verdict = "" if low > 0 or high < 0 else "; the interval holds 0"
    return (
        f"{clean(difference.after)} less {clean(difference.before)}: {100 * difference.avg.mean:+.1f} "
        f"points [{100 * low:+.1f}, {100 * high:+.1f}], paired over the same tasks{verdict}"
    )


def _interval(estimate: Estimate) -> str:
    return f"{percent(estimate.mean)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
