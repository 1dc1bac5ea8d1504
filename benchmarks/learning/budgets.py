"""Plot thinking budgets in recorded runs of configs/target-short.toml and target-long.toml. This starts no run.

    python -m benchmarks.learning.runs target-short --finished runs/target-short-0 runs/target-short-1 runs/target-short-2
    python -m benchmarks.learning.runs target-long --finished runs/target-long-0 runs/target-long-1 runs/target-long-2
    python -m benchmarks.learning.budgets

Prints a table and draws docs/images/budgets.png. Both show how task reward and length penalty change over the steps, as
INTELLECT-2's report does (arXiv 2505.07291, section 4). Both also show the length of completions for each target, in the
first steps and in the last ones.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from benchmarks.common.machine import IMAGES, RESULTS

FIRST, LAST = slice(10), slice(-10, None)  # steps that count as the run's beginning and end
SMOOTH = 5  # each point of a curve is the mean of this many steps
COLOURS = {"target-short": "#1f6fb4", "target-long": "#d1495b"}

Metrics = dict[str, list[float | None]]  # a run's values per step; None if a step had no group with that target


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs = {label: metrics_of(label) for label in COLOURS}
    sys.stdout.write(table(runs))
    draw(runs, IMAGES / "budgets.png")


def metrics_of(label: str) -> list[Metrics]:
    return [run["metrics"] for run in json.loads((RESULTS / f"{label}.json").read_text())["runs"]]


def targets_of(run: Metrics) -> list[int]:
    return sorted(int(name.split("/")[1]) for name in run if name.startswith("length/"))


def over(run: Metrics, name: str, steps: slice) -> float:
    return mean(value for value in run[name][steps] if value is not None)


def table(runs: dict[str, list[Metrics]]) -> str:
    """Return two Markdown tables: each run's first and last steps, and each config's mean lengths by target."""
    lines = ["| run | task reward | length penalty |", "| --- | --- | --- |"]
    for label, of in runs.items():
        for seed, run in enumerate(of):
            cells = [
                f"{over(run, name, FIRST):.2f} → {over(run, name, LAST):.2f}"
                for name in ("score/mean", "length_penalty/mean")
            ]
            lines.append(f"| {label}, seed {seed} | {' | '.join(cells)} |")
    lines += ["", "| run | target | length at first | length at last |", "| --- | --- | --- | --- |"]
    for label, of in runs.items():
        for target in targets_of(of[0]):
            ends = [mean(over(run, f"length/{target}/mean", steps) for run in of) for steps in (FIRST, LAST)]
            lines.append(f"| {label} | {target} | {ends[0]:.1f} | {ends[1]:.1f} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, list[Metrics]], path: Path) -> None:
    figure, (score, penalty, lengths) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axes, name, title in (
        (score, "score/mean", "task reward"),
        (penalty, "length_penalty/mean", "length penalty"),
    ):
        for label, of in runs.items():
            curves = [smooth(run[name]) for run in of]
            for curve in curves:
                axes.plot(curve, color=COLOURS[label], alpha=0.25, linewidth=1)
            axes.plot([mean(at) for at in zip(*curves, strict=False)], color=COLOURS[label], label=label)
        axes.set(title=title, xlabel="step")
        axes.set_ylim(bottom=0)
    for label, of in runs.items():
        targets = targets_of(of[0])
        for steps, style in ((FIRST, ":"), (LAST, "-")):
            for run in of:
                result = [over(run, f"length/{target}/mean", steps) for target in targets]
                lengths.plot(targets, result, style, marker="o", markersize=3, color=COLOURS[label], linewidth=1)
    most = max(target for of in runs.values() for target in targets_of(of[0]))
    lengths.plot([0, most], [0, most], color="#999999", linewidth=0.8)
    lengths.set(title="length by target: first steps dotted, last solid", xlabel="target, tokens", ylabel="tokens")
    score.legend(frameon=False)
    figure.savefig(path, dpi=110)


def smooth(values: list[float]) -> list[float]:
    return [mean(values[max(0, at + 1 - SMOOTH) : at + 1]) for at in range(len(values))]


if __name__ == "__main__":
    main()
