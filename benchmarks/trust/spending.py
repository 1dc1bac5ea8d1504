"""Simulate, without a model, a worker that makes the best use of every limit. Report its gain and when it is dismissed.

    python -m benchmarks.trust.spending                 benchmarks/results/spending.json, docs/images/spending.png

benchmarks/results/spending-measured.json has what honest work spent in real prefills of configs/tiny.toml and
configs/quickstart.toml: the exposure of every rollout, and for each pair of dtypes how many tokens were beyond each part of
the margin. The simulated rollouts have these exposures. Per unit of exposure, the Gumbel noise brings a second token within
x nats of the first with probability x. A share `useful` of these near ties leads to the wanted reward. `useful` is set so
that the attack at 90 % of all limits gains what a real one gained without these tests: 0.438 -> 0.511 on tiny, 0.069 ->
0.231 on SmolLM2. To lower the reward, every second near tie is assumed to help. Bets, capital and limits come from the
coordinator's code.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import IMAGES, RESULTS, ROOT, about, save
from shoal import config
from shoal.coordinator.trust import bets
from shoal.evidence import ALPHA, REWARD_TILT, TASK_TILT, Process, allocation
from shoal.protocol.messages import BEYOND, ToleranceSpent
from shoal.validator.checks import DISTRIBUTION_EVIDENCE
from shoal.validator.spending import STAKE

WORKERS, MOST = 8, 300  # simulated workers of each strategy, and submissions of each worker
HONEST, SUBMISSIONS = 40, 300
HARMFUL = 0.5  # share of a right completion's near ties that would make it wrong


@dataclass(frozen=True)
class Model:
    name: str
    config: str
    reward: float  # mean of honest work
    tokens: float  # per rollout
    useful: float  # share of near ties that would make a completion right
    groups: int
    pair: str  # dtypes of worker and validator between which honest work has the most noise


MODELS = [
    Model("tiny", "tiny", 0.438, 3.8, 0.5, 16, "bfloat16|float32"),
    Model("SmolLM2", "quickstart", 0.069, 15.0, 0.03, 4, "bfloat16|bfloat16"),
]


@dataclass(frozen=True)
class Strategy:
    """`reach`: the largest margin, in units of its limit. `rate`: the most tokens chosen per unit of exposure."""

    name: str
    reach: float = 0.0
    rate: float | None = None
    decoys: float = 0.0  # tokens changed without effect, per token changed for the reward
    far: int = 0  # tokens beyond the margin limit in each submission
    figures: float = 0.4  # mismatches of proofs and logprobs, as a share of their limits
    distribution: float = -5.0


def strategies(model: Model, settings: Any) -> list[Strategy]:
    limits, rate = settings.validator, settings.evidence.rates[0]
    budget = 0.9 * limits.sampling_margin_mean * model.tokens  # nats per rollout
    exposure = exposures(model).mean()
    reach = min(float(np.sqrt(2 * budget / (exposure * model.useful))) / limits.sampling_margin, 1.0)
    return [
        Strategy("90 % of every limit", reach, figures=0.9),
        Strategy("90 % of the mean margin", reach),
        Strategy("two tokens beyond the margin", far=2),
        Strategy("up to half of the margin", 1 / 2),
        Strategy("up to an eighth of the margin", 1 / 8),
        Strategy("an eighth, at the honest rate", 1 / 8, rate=rate / 2),
        Strategy("an eighth, half of the honest rate", 1 / 8, rate=rate / 4),
        Strategy("an eighth, with as many decoys", 1 / 8, rate=rate / 4, decoys=1.0),
        Strategy("an eighth, with nine times as many decoys", 1 / 8, rate=rate / 20, decoys=9.0),
        Strategy("proofs and logprobs at 90 %", figures=0.9),
        Strategy("tokens at 90 % of the distribution limit", distribution=0.9 * DISTRIBUTION_EVIDENCE),
        Strategy("tokens at 10 % of the distribution limit", distribution=0.1 * DISTRIBUTION_EVIDENCE),
    ]


def measured(model: Model) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((RESULTS / "spending-measured.json").read_text())[model.name]
    return stored


def exposures(model: Model) -> np.ndarray:
    return np.array(measured(model)["exposure"])


def honest_rates(model: Model) -> np.ndarray:
    """Return how many tokens per unit of exposure are beyond each part of the margin, in the noisiest pair of dtypes."""
    stored = measured(model)
    return np.array(stored["beyond"][model.pair]) / stored["total_exposure"]


def submission(
    model: Model, plan: Strategy, settings: Any, up: bool, rng: np.random.Generator
) -> tuple[ToleranceSpent, float]:
    """Return what one submission spent, and how far the mean reward of its rollouts moved in the intended direction."""
    size = settings.sampling.group_size
    shape = (model.groups, size)
    exposed = rng.choice(exposures(model), shape)
    chance = rng.beta(2 * model.reward + 0.2, 2 * (1 - model.reward) + 0.2, model.groups)
    chance *= model.reward / ((2 * model.reward + 0.2) / 2.4)
    right = rng.random(shape) < np.clip(chance, 0, 1)[:, None]
    wished = right if up else ~right
    useful = model.useful if up else HARMFUL
    # The margin of the cheapest useful change in each rollout, in units of the limit.
    limit = settings.validator.sampling_margin
    nats = rng.exponential(1 / (exposed * useful)) / limit
    moved = ~wished & (nats <= plan.reach)
    if plan.rate is not None:
        room = plan.rate * exposed.mean() / max(moved.mean(), 1e-9)
        moved &= rng.random(shape) < room
    counts, sizes = moved.astype(int), list(nats[moved])
    if plan.far:
        open_ = np.argwhere(~wished & (rng.exponential(1 / (exposed * useful)) / limit <= 4))[: plan.far]
        for place in open_:
            moved[tuple(place)] = True
            counts[tuple(place)] += 1
            sizes.append(2.0)
    decoys = rng.poisson(plan.decoys * len(sizes))
    for place in rng.integers(0, shape[0] * size, decoys):
        counts.flat[place] += 1
        sizes.append(float(rng.uniform(0, plan.reach)))
    noise = honest_rates(model) if plan.name == "honest" else np.zeros(4)
    numbers = rng.poisson(exposed[..., None] * -np.diff([*noise, 0.0]))
    counts = counts + numbers.sum(-1)
    beyond = [int((np.array(sizes) > part).sum() + numbers[..., n:].sum()) for n, part in enumerate(BEYOND)]
    reward = (wished | moved).astype(float) if up else (right & ~moved).astype(float)
    tilt = REWARD_TILT

    def within(sign: int) -> float:
        groups = zip(counts.tolist(), exposed.tolist(), (sign * reward).tolist(), strict=True)
        return sum(allocation(*of_group, tilt, STAKE) for of_group in groups)

    def between(sign: int) -> float:
        means = (sign * reward.mean(1)).tolist()
        return allocation(counts.sum(1).tolist(), exposed.sum(1).tolist(), means, TASK_TILT, STAKE)

    figures = settings.validator
    used = ToleranceSpent(
        exposure=float(exposed.sum()),
        beyond=(beyond[0], beyond[1], beyond[2], beyond[3]),
        better=within(1),
        worse=within(-1),
        easier=between(1),
        harder=between(-1),
        proof_exponent_mean=plan.figures * figures.proof_exponent_mean,
        proof_mantissa_mean=plan.figures * figures.proof_mantissa_mean,
        logprob_error_mean=plan.figures * figures.logprob_error_mean,
        distribution=plan.distribution,
    )
    return used, float(moved.mean())


def lasted(
    draw: Callable[[], tuple[ToleranceSpent, float]], settings: Any, most: int
) -> tuple[int | None, float, float]:
    """Return submissions until a worker is dismissed (None: not within `most`), mean gain, and highest evidence in nats."""
    process, gains, highest = Process(), [], 0.0
    for number in range(1, most + 1):
        used, gain = draw()
        gains.append(gain)
        process = process.after(bets(used, settings))
        highest = max(highest, process.evidence)
        if process.evidence >= -np.log(ALPHA):
            return number, statistics.fmean(gains), highest
    return None, statistics.fmean(gains), highest


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    result: dict[str, Any] = about() | {"alpha": None, "rows": [], "honest": []}
    for model in MODELS:
        settings = config.load(ROOT / "configs" / f"{model.config}.toml")
        result["alpha"] = ALPHA
        honest = Strategy("honest", figures=0.6)
        highest = [
            lasted(lambda: submission(model, honest, settings, True, rng), settings, SUBMISSIONS)[2]  # noqa: B023
            for _ in range(HONEST)
        ]
        result["honest"].append(
            {"model": model.name, "workers": HONEST, "submissions": SUBMISSIONS, "highest_nats": max(highest)}
        )
        for plan in strategies(model, settings):
            for up in (True, False):
                runs = [
                    lasted(lambda: submission(model, plan, settings, up, rng), settings, MOST)  # noqa: B023
                    for _ in range(WORKERS)
                ]
                ends = sorted(end or MOST + 1 for end, _, _ in runs)
                row = {
                    "model": model.name,
                    "strategy": plan.name,
                    "direction": "raise" if up else "lower",
                    "gain": statistics.fmean(gain for _, gain, _ in runs),
                    "found": sum(end is not None for end, _, _ in runs),
                    "workers": WORKERS,
                    "median": ends[WORKERS // 2],
                    "worst": ends[-1],
                }
                result["rows"].append(row)
                sys.stdout.write(line(row))
                sys.stdout.flush()
    save(RESULTS / "spending.json", result)
    plot(result, IMAGES / "spending.png")


def line(row: dict[str, Any]) -> str:
    late = f"not within {MOST}"
    ends = ", ".join(late if row[key] > MOST else str(row[key]) for key in ("median", "worst"))
    sign = "+" if row["direction"] == "raise" else "−"
    gain = f"{sign}{row['gain']:.3f}" if row["gain"] else "0"
    return f"| {row['model']} | {row['strategy']} | {row['direction']} | {gain} | {ends} |\n"


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(12, 4.6), sharex=True)
    for panel, model in zip(panels, MODELS, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model.name]
        names = list(dict.fromkeys(row["strategy"] for row in rows))
        for row in rows:
            y = names.index(row["strategy"])
            marker, color = ("^", "tab:red") if row["direction"] == "raise" else ("v", "tab:blue")
            free = row["found"] == 0
            panel.scatter(
                min(row["median"], MOST), y, s=30 + 1500 * row["gain"], marker=marker,
                facecolors="none" if free else color, edgecolors=color, alpha=0.7,
            )  # fmt: skip
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.invert_yaxis()
        panel.set_xscale("log")
        panel.grid(alpha=0.25)
        panel.set_title(model.name)
        panel.set_xlabel("submissions until it is dismissed (median)")
    figure.suptitle(
        f"Red raises, blue lowers the reward; size: by how much; empty: not detected within {MOST} submissions",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
