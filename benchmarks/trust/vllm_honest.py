"""Plot what `shoal calibrate` measured with honest vLLM workers and torch validators: docs/images/vllm.png.

    shoal calibrate configs/tiny.toml --set 'workers.engines=["vllm"]' --submissions 40 --out DIR
    python -m benchmarks.trust.vllm_honest DIR [DIR ...] --config configs/tiny.toml

Each calibration has its own worker key, and therefore its own tasks and seeds, so several calibrations can be combined.
Each panel shows a statistic's distribution over all judgements, with one line per pair of dtypes, and the config's limit.
Prints the numbers of rollouts and judgements, and the worst value of each statistic.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.machine import IMAGES
from shoal.cli.calibrate import LIMITS
from shoal.config import load

IMAGE = IMAGES / "vllm.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibrations", type=Path, nargs="+")
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [
        row | {"calibration": str(folder)}
        for folder in arguments.calibrations
        for row in json.loads((folder / "measured.json").read_text())["rows"]
        if row["worker"]["engine"] == "vllm"
    ]
    limits = load(arguments.config).validator
    figure, panels = plt.subplots(1, len(LIMITS), figsize=(3.2 * len(LIMITS), 2.8), layout="constrained")
    pairs = sorted({(row["worker"]["dtype"], row["validator"]["dtype"]) for row in rows})
    for panel, (statistic, (limit, _, _)) in zip(panels, LIMITS.items(), strict=True):
        for pair in pairs:
            values = sorted(
                row[statistic] for row in rows if (row["worker"]["dtype"], row["validator"]["dtype"]) == pair
            )
            panel.step(values, [(n + 1) / len(values) for n in range(len(values))], label=f"{pair[0]} under {pair[1]}")
        panel.axvline(getattr(limits, limit), color="black", linestyle=":", label="limit of the config")
        panel.set_title(statistic, fontsize=9)
        worst = max(row[statistic] for row in rows)
        sys.stdout.write(f"{statistic}: worst {worst:.4g}, limit {getattr(limits, limit):g}\n")
    panels[0].set_ylabel("share of judgements")
    panels[-1].legend(fontsize=6)
    figure.savefig(IMAGE, dpi=110)
    made = {
        (row["calibration"], row["weights"], json.dumps(row["worker"]), row["number"]): row["rollouts"] for row in rows
    }
    sys.stdout.write(
        f"{sum(made.values()):.0f} rollouts, {len(rows)} judgements of {sum(row['rollouts'] for row in rows):.0f} rollouts, "
        f"{sum(row['failed_checks'] > 0 for row in rows)} beyond the limits\n"
    )


if __name__ == "__main__":
    main()
