"""The paper's asynchrony ablation in small: the tiny run at async level 0, 1, 2 and 4, three seeds each.

    python benchmarks/async_levels.py [--steps 40] [--seeds 0 1 2] [--levels 0 1 2 4]

The claim that is checked: no measurable loss of reward up to level 4 (INTELLECT-2, arXiv 2505.07291, section 4; there with
a 1.5B model on mathematics). Measured: mean reward of the last ten steps and held-out accuracy of the last version, their
difference to level 0 over the seeds, and its 95 % interval (Welch's t). Levels take turns within each seed.
Writes benchmarks/results/async_levels.json and docs/images/async-levels.png.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from machine import describe
from runs import one_run

from shoal.report import write_png

HERE = Path(__file__).parent
PATH, PICTURE = HERE / "results" / "async_levels.json", HERE.parent / "docs" / "images" / "async-levels.png"
LAST = 10  # steps whose mean reward is compared
COLORS = {0: "#555555", 1: "#1f6fb4", 2: "#2a9d8f", 4: "#d1495b"}
T_95 = {2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, two-sided, by degrees of freedom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 4])
    arguments = parser.parse_args()
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": describe(), "runs": []}
    for seed in arguments.seeds:
        for level in arguments.levels:
            more = ["--set", f"coordinator.async_level={level}", "--set", f"run.steps={arguments.steps}"]
            result["runs"].append(figures(level, seed, one_run("tiny", seed, "", more)))
            PATH.write_text(json.dumps(result, indent=1) + "\n")
            told = {name: value for name, value in result["runs"][-1].items() if not isinstance(value, list)}
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()
    result["levels"] = [compare(result["runs"], level) for level in arguments.levels]
    PATH.write_text(json.dumps(result, indent=1) + "\n")
    draw(result["runs"])
    sys.stdout.write("".join(f"{row}\n" for row in result["levels"]))


def figures(level: int, seed: int, run: dict[str, Any]) -> dict[str, Any]:
    rewards = [step["reward/mean"] for step in run["metrics"]]
    return {
        "async_level": level,
        "seed": seed,
        "reward_last": statistics.mean(rewards[-LAST:]),
        "greedy_before": run["heldout_before"]["greedy"],
        "greedy_after": run["heldout_after"]["greedy"],
        "sampled_after": run["heldout_after"]["sampled"],
        "staleness_mean": statistics.mean(step["async/staleness_mean"] for step in run["metrics"]),
        "staleness_max": max(step["async/staleness_max"] for step in run["metrics"]),
        "grad_norm_max": max(step["optim/grad_norm"] for step in run["metrics"]),
        "wall_s": run["wall_s"],
        "rewards": rewards,
    }


def compare(runs: list[dict[str, Any]], level: int) -> dict[str, Any]:
    """Means at `level`, and the difference to level 0 with its interval."""
    row: dict[str, Any] = {"async_level": level}
    for name in ("reward_last", "greedy_after", "sampled_after"):
        mine, base = ([run[name] for run in runs if run["async_level"] == of] for of in (level, 0))
        row[name] = statistics.mean(mine)
        if level:
            row[f"{name}_difference"] = row[name] - statistics.mean(base)
            row[f"{name}_interval"] = half_interval(mine, base)
    return row


def half_interval(a: list[float], b: list[float]) -> float:
    """Half the width of the 95 % interval of mean(a) - mean(b), with variances of their own (Welch)."""
    errors = [statistics.variance(sample) / len(sample) for sample in (a, b)]
    total = sum(errors)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(e**2 / (len(sample) - 1) for e, sample in zip(errors, (a, b), strict=True))
    return T_95[max(2, min(4, math.floor(freedom)))] * math.sqrt(total)


def draw(runs: list[dict[str, Any]]) -> None:
    """Each run's reward as a thin line, the mean over seeds of each level as a thick one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for level in sorted({run["async_level"] for run in runs}):
        curves = [run["rewards"] for run in runs if run["async_level"] == level]
        color = COLORS.get(level, "#7b5ea7")
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.6, alpha=0.4)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, label=f"async level {level}")
    axes.set(xlabel="step", ylabel="mean reward of the step's groups")
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, PICTURE)


if __name__ == "__main__":
    main()
