"""What an evaluation shows: results.json, a table, and a picture of bars with intervals.

Invariant: every figure stands with its interval, its number of tasks and what it leaves out. Called by `shoal eval`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.evals.results import Difference, Result
from shoal.files import write_file
from shoal.watch.estimates import Estimate
from shoal.watch.figures import clean, count, percent
from shoal.watch.plot import COLORS, INK, write_png

PICTURE = "results.png"


def write_results(
    path: Path, results: Sequence[Result], differences: Sequence[Difference], facts: Mapping[str, Any]
) -> None:
    """`facts`: what was evaluated and by which command. Raises OSError."""
    found = {
        **facts,
        "results": [result.as_json() for result in results],
        "differences": [asdict(difference) for difference in differences],
    }
    write_file(path, (json.dumps(found, indent=2, allow_nan=False) + "\n").encode())


def table(results: Sequence[Result], differences: Sequence[Difference]) -> RenderableType:
    """A table per suite, a column per model. 95 % intervals in brackets."""
    parts: list[RenderableType] = []
    for suite in dict.fromkeys(result.suite for result in results):
        own = [result for result in results if result.suite == suite]
        parts += [Text(f"{suite}: {own[0].tasks} tasks, k = {own[0].k}", style="bold"), _table(own)]
        parts += [Text(sentence(difference)) for difference in differences if difference.suite == suite]
        parts.append(Text())
    return Group(*parts, *map(Text, _notes(results)))


def _table(results: Sequence[Result]) -> Table:
    shown = Table(box=None, padding=(0, 2), pad_edge=False, show_header=True, header_style="")
    shown.add_column("", no_wrap=True)
    for result in results:
        shown.add_column(Text(clean(result.model), overflow="fold"), no_wrap=True)
    k = results[0].k
    shown.add_row(f"avg@{k}", *[_interval(result.avg) for result in results], style="bold")
    for j in sorted(results[0].pass_at)[1:]:  # pass@1 is avg@k wherever scores are 0 or 1
        shown.add_row(f"pass@{j}", *[_interval(result.pass_at[j]) for result in results])
    for name in sorted({name for result in results for name in result.parts}):
        shown.add_row(name, *[percent(result.parts.get(name)) for result in results])
    shown.add_row("wrong format", *[percent(result.wrong_format) for result in results])
    errors = [Text(percent(r.grader_error), style="bold red" if r.grader_error else "") for r in results]
    shown.add_row("grader error", *errors)
    shown.add_row("cut off", *[percent(result.cut_off) for result in results])
    shown.add_row("tokens", *[count(result.tokens_mean) for result in results])
    return shown


def sentence(difference: Difference) -> str:
    """`after less before: +4.0 points [+1.2, +6.9], paired over the same tasks`."""
    low, high = difference.avg.low, difference.avg.high
    verdict = "" if low > 0 or high < 0 else "; the interval holds 0"
    return (
        f"{clean(difference.after)} less {clean(difference.before)}: {100 * difference.avg.mean:+.1f} "
        f"points [{100 * low:+.1f}, {100 * high:+.1f}], paired over the same tasks{verdict}"
    )


def draw(results: Sequence[Result], path: Path) -> None:
    """A bar for each model on each suite, with its 95 % interval. Raises OSError."""
    from matplotlib.figure import Figure

    suites = list(dict.fromkeys(result.suite for result in results))
    models = list(dict.fromkeys(result.model for result in results))
    figure = Figure(figsize=(max(4.5, 1.2 + 1.1 * len(suites) * max(len(models), 1)), 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        own = [result for result in results if result.model == model]
        at = [suites.index(result.suite) + (number - (len(models) - 1) / 2) * width for result in own]
        means = [result.avg.mean for result in own]
        spans = [
            [max(r.avg.mean - r.avg.low, 0.0) for r in own],
            [max(r.avg.high - r.avg.mean, 0.0) for r in own],
        ]
        color = COLORS[number % len(COLORS)]
        axes.bar(at, means, width * 0.92, color=color, yerr=spans, capsize=3, ecolor=INK, label=clean(model))
        for x, result in zip(at, own, strict=True):
            axes.text(x, result.avg.high + 0.015, percent(result.avg.mean), ha="center", color=INK, fontsize=8)
    sizes = {result.suite: f"{result.suite}\nn {result.tasks}, k {result.k}" for result in results}
    axes.set_xticks(range(len(suites)), [sizes[suite] for suite in suites], color=INK)
    axes.set_ylim(0, min(1.1, 1.15 * max(result.avg.high for result in results) + 0.05))
    axes.set_ylabel("avg@k, with 95 % intervals", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for text in figure.legend(loc="outside upper left", ncols=2, frameon=False).get_texts():
        text.set_parse_math(False)  # a model may be called anything
    write_png(figure, path)


def _interval(estimate: Estimate) -> str:
    return f"{percent(estimate.mean)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _notes(results: Sequence[Result]) -> list[str]:
    methods = sorted({result.avg.method for result in results})
    notes = [f"95 % intervals in brackets ({', '.join(methods)}). Wrong formats and grader errors count as 0."]
    if broken := [result for result in results if result.grader_error]:
        notes.append(
            f"Grader errors: the score of {', '.join(sorted({r.suite for r in broken}))} is too low; grades.jsonl says why."
        )
    if limited := [result for result in results if result.unrepeatable]:
        worst = max(result.unrepeatable for result in limited)
        notes.append(
            f"Up to {percent(worst)} of scores hit a limit of time or memory and may differ on another machine."
        )
    return notes
