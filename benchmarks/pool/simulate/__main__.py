"""Simulate pools of 10 to 10,000 workers, and compare a simulation with a recorded run.

    python -m benchmarks.pool.simulate [--sizes 10 100 1000 10000] [--names "same batch"] [--run RUN_FOLDER]

`--run` compares a simulation with the finished run in that folder. Writes results/simulate.json and
docs/images/simulate.png, and prints tables. Other entries of the results file stay as they are.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.machine import IMAGES, RESULTS, about, save
from benchmarks.pool.simulate.pool import Pool
from benchmarks.pool.simulate.recorded import recorded
from benchmarks.pool.simulate.settings import SIZES, cases

PATH = RESULTS / "simulate.json"
SEEDS = range(5)  # seeds of the comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a finished run to compare with")
    parser.add_argument("--sizes", type=int, nargs="*", choices=SIZES, default=SIZES, help="numbers of workers")
    parser.add_argument("--names", nargs="*", help="names of the cases; none: all")
    arguments = parser.parse_args()
    if arguments.run:
        keep({"compared": compare(arguments.run)})
    for case in cases():
        if case.workers not in arguments.sizes or (arguments.names and case.name not in arguments.names):
            continue
        started_s = time.perf_counter()
        row = asdict(Pool(case.setting).run())
        took_s = time.perf_counter() - started_s
        name = {"name": case.name, "workers": case.workers, "async_level": case.async_level}
        keep({"pools": {f"{case.name}, {case.workers}, level {case.async_level}": name | row | {"took_s": took_s}}})
        shares = [f"{row[name]:.0%}" for name in ("generating", "links", "validators", "learner", "wasted")]
        sys.stdout.write(
            f"| {case.name} | {case.workers:,} | {case.async_level} | {row['step_s'] / 60:.0f} min | "
            f"{' | '.join(shares)} | {row['staleness']:.1f} |\n"
        )
        sys.stdout.flush()
    draw(list(keep({})["pools"].values()), IMAGES / "simulate.png")


def keep(new: dict[str, Any]) -> dict[str, Any]:
    """Add these figures to the results file. Return all its figures."""
    result: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"pools": {}}
    result = result | about() | new | {"pools": result["pools"] | new.get("pools", {})}
    save(PATH, result)
    return result


def compare(folder: Path) -> dict[str, Any]:
    setting, measured = recorded(folder)
    runs = [asdict(Pool(setting, seed).run()) for seed in SEEDS]
    row = {name: sum(run[name] for run in runs) / len(runs) for name in asdict(measured)}
    for name, value in asdict(measured).items():
        sys.stdout.write(f"| {name} | {value:.3f} | {row[name]:.3f} | {row[name] / value - 1:+.0%} |\n")
    return {"setting": asdict(setting), "measured": asdict(measured), "simulated": row}


def draw(pools: list[dict[str, Any]], path: Path) -> None:
    """Plot the workers' utilisation by the pool's size, in a panel for each async level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = (1, 2, 4)
    figure, panels = pyplot.subplots(1, len(levels), figsize=(11, 3.4), sharey=True)
    for panel, level in zip(panels, levels, strict=True):
        chosen = [one for one in pools if one["async_level"] == level and not one["name"].startswith("paper")]
        for name in dict.fromkeys(one["name"] for one in chosen):
            own = sorted((one for one in chosen if one["name"] == name), key=lambda one: one["workers"])
            panel.plot([one["workers"] for one in own], [100 * one["generating"] for one in own], "o-", label=name)
        panel.set(xscale="log", xlabel="workers", title=f"async level {level}", ylim=(0, 100))
    panels[0].set_ylabel("workers generating, % of the time")
    panels[0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
