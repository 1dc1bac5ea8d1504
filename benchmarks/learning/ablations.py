"""Measure how parts of the recipe change learning: older rollouts, two-sided clipping, both task filters, length budgets.

    python -m benchmarks.learning.ablations levels --seeds 0 1 2
    python -m benchmarks.learning.ablations sums --seeds 0 1 2
    python -m benchmarks.learning.ablations words --seeds 0 1 2 --set model.name=FOLDER
    python -m benchmarks.learning.ablations clip --seeds 0 --set model.name=FOLDER
    python -m benchmarks.learning.ablations gsm8k --seeds 0 1 --set model.name=FOLDER --save runs/models

Each arm of a study trains a model in one process, with the same tasks and seeds: SmolLM2-135M, or the models of
configs/words.toml and configs/recipe.toml. `shoal filter` writes the list of tasks that the offline filter keeps. As in the
paper, step s trains on the batch sampled by version `s - level` (by version 0 in the first steps). In a real pool, rollouts
may also be younger. For each seed, all arms run in turn. The recipe is INTELLECT-2's (arXiv 2505.07291, section 4), except
for the learning rate, because the paper's 3e-7 is for 32 billion parameters. In the arms with random rewards, a reward is a
coin flip, so what they gain, they did not learn from the tasks.

A run measures the reward of each version's samples, its mean over the last quarter of the run, and held-out accuracy before
and after. An arm's means over the seeds are compared with those of the first arm, from three seeds on with 95 % intervals
(Welch's t). Writes benchmarks/results/ablations-STUDY.json and docs/images/ablations-STUDY.png. Runs that are already in
the file are skipped.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.machine import IMAGES, RESULTS, ROOT, about, commit, save
from shoal import tasks
from shoal.config import load
from shoal.engine.torch_engine import TorchEngine
from shoal.evals.examiner import Examiner
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.learner.updates import train
from shoal.model.dtype import pick
from shoal.model.sampling import rollout_seed
from shoal.model.sources import resolve
from shoal.tasks.budget import cycled_target, reward, rewards_differ
from shoal.watch.plot import write_png

RECIPE = [
    "learner.optimizer_steps_per_step=8",
    "learner.loss.normalize_std=false",
    "learner.loss.beta=0.001",
    "learner.loss.entropy=1e-4",
    "sampling.group_size=16",
    "coordinator.prompts_per_step=8",
]
MAX_DRAWS = 8  # maximum batches sampled for one step; after that the step trains on fewer groups
COLORS = ["#555555", "#1f6fb4", "#2a9d8f", "#d1495b", "#7b5ea7", "#e08d3c"]
T_95 = {2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, two-sided, by degrees of freedom


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    level: int = 4
    settings: list[str] = field(default_factory=list)
    random_rewards: bool = False


@dataclass(frozen=True)
class Study:
    config: str
    steps: int
    settings: list[str]
    arms: dict[str, Arm]


SUMS = ["learner.lr=6e-6", "learner.warmup_steps=25", "tasks.sources.0.options.operand_max=99"]
STUDIES = {
    "levels": Study(
        "quickstart",
        16,
        SUMS,
        {f"{level} versions old": Arm(level) for level in (0, 1, 2, 4)} | {"random rewards": Arm(0, [], True)},
    ),
    "sums": Study(
        "quickstart",
        24,
        [*SUMS, "tasks.sources.0.keep=runs/sums-filter/manifest.json"],
        {
            "recipe": Arm(),
            "one-sided clip": Arm(settings=["learner.loss.delta=1e9"]),
            "no offline filter": Arm(settings=["tasks.sources.0.keep="]),
            "no online filter": Arm(settings=["coordinator.online_filter=false"]),
        },
    ),
    "words": Study(
        "words",
        16,
        [],
        {
            "recipe": Arm(1),
            "random rewards": Arm(1, [], True),
            "no offline filter": Arm(1, ["tasks.sources.0.keep="]),
            "no online filter": Arm(1, ["coordinator.online_filter=false"]),
        },
    ),
    "clip": Study(
        "words",
        16,
        ["coordinator.online_filter=false"],
        {"two-sided clip": Arm(), "one-sided clip": Arm(settings=["learner.loss.delta=1e9"])},
    ),
    "budgets": Study(
        "words",
        16,
        ["tasks.length_targets=[12, 24, 36]"],
        {
            "no penalty": Arm(1, ["tasks.length_penalty=0"]),
            "penalty": Arm(1, ["tasks.length_penalty=0.02"]),
        },
    ),
    "gsm8k": Study(
        "recipe",
        16,
        [],
        {"recipe": Arm(1), "random rewards": Arm(1, [], True)},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="some arms of the study (default: all)")
    parser.add_argument("--steps", type=int, help="number of steps (default: that of the study)")
    parser.add_argument("--heldout", type=int, default=256, help="number of held-out tasks (default: 256)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the config of every arm"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/ablations-STUDY.json")
    parser.add_argument("--save", type=Path, help="folder for each run's last version")
    arguments = parser.parse_args()
    study = STUDIES[arguments.study]
    path = arguments.out or RESULTS / f"ablations-{arguments.study}.json"
    steps = arguments.steps or study.steps
    result: dict[str, Any] = about() | {"runs": []}
    if path.exists():
        result["runs"] = json.loads(path.read_text())["runs"]
    done = {(run["arm"], run["seed"], run["steps"]) for run in result["runs"]}
    for seed in arguments.seeds:
        for name in arguments.arms or study.arms:
            if (name, seed, steps) in done:
                continue
            arm = study.arms[name]
            settings = [*RECIPE, *study.settings, *arm.settings, *arguments.set]
            with Run(study.config, settings, arm, seed) as run:
                figures = run.figures(steps, arguments.heldout)
                if arguments.save:
                    arguments.save.mkdir(parents=True, exist_ok=True)
                    run.policy.write(arguments.save / f"{name.replace(' ', '-')}-{seed}", replace=True)
            settings = [setting for setting in settings if "/" not in setting]
            result["runs"].append({"arm": name, "seed": seed, "commit": commit(), "settings": settings} | figures)
            save(path, result)
            sys.stdout.write(f"{ ({k: v for k, v in result['runs'][-1].items() if not isinstance(v, list)}) }\n")
            sys.stdout.flush()
    names = arguments.arms or list(study.arms)
    result["arms"] = [compare(result["runs"], name, names[0]) for name in names]
    save(path, result)
    drawn = [name for name in names if not study.arms[name].random_rewards]  # coin flips say nothing about a version
    draw(result["runs"], drawn, IMAGES / f"{path.stem}.png")
    sys.stdout.write("".join(f"{row}\n" for row in result["arms"]))


class Sampled(NamedTuple):
    groups: list[Group]  # to train on
    rewards: list[float]  # of all completions
    drawn: int  # groups sampled


class Run:
    """One training run, as a context manager."""

    def __init__(self, config: str, settings: list[str], arm: Arm, seed: int) -> None:
        self.config = load(ROOT / "configs" / f"{config}.toml", settings)
        self.arm, self.seed = arm, seed
        self.random = random.Random(seed)
        self.tasks = tasks.load(self.config.tasks)
        self.drawn = 0  # groups so far
        model, device = resolve(self.config.model.name), self.config.model.device
        dtype, _ = pick(self.config.model.dtype, device)
        torch.manual_seed(seed)  # adapters start with random numbers
        self.policy = Policy(model, self.config.learner, dtype, device, self.config.sampling.temperature)
        self.examiner = Examiner(self.config, self.tasks.files)
        self.engine = TorchEngine(dtype, device)
        self.temporary = tempfile.TemporaryDirectory()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.examiner.close()
        self.temporary.cleanup()

    def figures(self, steps: int, n_heldout: int) -> dict[str, Any]:
        """Train. Return all measurements."""
        self.load_policy()
        before = self.heldout(n_heldout)
        waiting = deque(self.sample() for _ in range(self.arm.level))
        series: dict[str, list[float]] = {"reward": [], "drawn": [], "tokens": []}
        for _ in range(steps):
            waiting.append(self.sample())
            series["reward"].append(statistics.mean(waiting[-1].rewards))
            series["drawn"].append(waiting[-1].drawn)
            groups = waiting.popleft().groups
            series["tokens"].append(sum(group.n_tokens for group in groups))
            for name, value in (train(self.policy, groups, self.config) if groups else {}).items():
                series.setdefault(name, []).append(value)
            self.load_policy()
            sys.stderr.write(f"{self.drawn} groups sampled, reward {series['reward'][-1]:.3f}\n")
        kept = (
            "reward",
            "drawn",
            "tokens",
            "optim/grad_norm",
            "policy/mismatch_kl",
            "policy/clip_delta",
            "policy/entropy",
        )
        return {
            "steps": steps,
            "reward_last": statistics.mean(series["reward"][-(steps // 4) :]),
            "drawn_total": sum(series["drawn"]),
            "tokens_total": sum(series["tokens"]),
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in self.heldout(n_heldout).items()},
            "series": {name: series[name] for name in kept if name in series},
        }

    def load_policy(self) -> None:
        """Write the policy as a version and load it into the engine, as a worker does."""
        folder = Path(self.temporary.name) / "version"
        self.policy.write(folder, replace=True)
        self.examiner.load(self.engine, folder)

    def sample(self) -> Sampled:
        """Sample a step's batch from the policy."""
        wanted, online_filter = self.config.coordinator.prompts_per_step, self.config.coordinator.online_filter
        kept: list[Group] = []
        rewards: list[float] = []
        start = self.drawn
        for _ in range(MAX_DRAWS if online_filter else 1):
            groups = self.draw(wanted)
            rewards += chain.from_iterable(group.rewards for group in groups)
            kept += [group for group in groups if rewards_differ(group.rewards) or not online_filter]
            if len(kept) >= wanted:
                break
        return Sampled(kept[:wanted], rewards, self.drawn - start)

    def draw(self, n: int) -> list[Group]:
        """Sample and grade a group for each of `n` random tasks."""
        section, first = self.config.tasks, self.drawn
        chosen = [self.tasks.train[self.random.randrange(len(self.tasks.train))] for _ in range(n)]
        self.drawn += n
        seeds = [self.seeds("train", first + number, self.config.sampling.group_size) for number in range(n)]
        completions, grades = self.examiner.ask(chosen, first, seeds, self.config.sampling.temperature)
        result = []
        for number, (task, group, graded) in enumerate(zip(chosen, completions, grades, strict=True), start=first):
            target = cycled_target(section, number)
            prompt = self.examiner.prompt(task, number)
            scores = [
                reward(grade.score, len(each.tokens), target, section)
                for each, grade in zip(group, graded, strict=True)
            ]
            if self.arm.random_rewards:
                scores = [float(self.random.random() < 0.5) for _ in group]
            result.append(Group("", 0, prompt, [c.tokens for c in group], [c.logprobs for c in group], scores))
        return result

    def heldout(self, n: int) -> dict[str, float]:
        """Return held-out accuracy, greedy and sampled; with length budgets, also how sampled lengths follow targets."""
        chosen = [self.tasks.heldout[number] for number in range(min(n, len(self.tasks.heldout)))]
        result = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            seeds = [self.seeds("heldout", number, 1) for number in range(len(chosen))]
            completions, grades = self.examiner.ask(chosen, 0, seeds, temperature)
            result[name] = statistics.mean(grade.score for (grade,) in grades)
        if self.config.tasks.length_targets:
            lengths: dict[int, list[int]] = {}  # sampled, by target
            for number, (each,) in enumerate(completions):
                lengths.setdefault(cycled_target(self.config.tasks, number), []).append(len(each.tokens))
            errors = (abs(length - target) for target in lengths for length in lengths[target])
            result["length_error"] = statistics.mean(errors)
            result |= {f"length_{target}": statistics.mean(lengths[target]) for target in sorted(lengths)}
        return result

    def seeds(self, use: str, number: int, n: int) -> list[int]:
        return [rollout_seed(f"ablations {use}", number, str(self.seed), 0, g) for g in range(n)]


def compare(runs: list[dict[str, Any]], arm: str, first: str) -> dict[str, Any]:
    """Return an arm's means over the seeds, and their differences from the first arm with intervals."""
    row: dict[str, Any] = {"arm": arm}
    for name in ("reward_last", "greedy_after", "sampled_after", "length_error_after", "drawn_total", "tokens_total"):
        values, base = ([run[name] for run in runs if run["arm"] == each and name in run] for each in (arm, first))
        if not values:
            continue
        row[name] = statistics.mean(values)
        if arm != first and min(len(values), len(base)) > 2:  # Welch's t is useless with two
            row[f"{name}_difference"] = row[name] - statistics.mean(base)
            row[f"{name}_interval"] = half_interval(values, base)
    return row


def half_interval(a: list[float], b: list[float]) -> float:
    """Return half the width of the 95 % interval of mean(a) - mean(b) (Welch). Each needs three values or more."""
    errors = [statistics.variance(sample) / len(sample) for sample in (a, b)]
    total = sum(errors)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(e**2 / (len(sample) - 1) for e, sample in zip(errors, (a, b), strict=True))
    return T_95[max(2, min(4, math.floor(freedom)))] * math.sqrt(total)


def draw(runs: list[dict[str, Any]], arms: list[str], picture: Path) -> None:
    """Plot the reward of each arm's versions: the mean over seeds as a line, the range as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for arm, color in zip(arms, COLORS, strict=False):
        curves = [run["series"]["reward"] for run in runs if run["arm"] == arm]
        if not curves:
            continue
        columns = list(zip(*curves, strict=True))
        versions = range(len(columns))
        axes.fill_between(versions, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15)
        axes.plot(versions, [statistics.mean(c) for c in columns], color=color, linewidth=2, label=arm)
    axes.set(xlabel="policy version", ylabel="mean reward of its samples")
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, picture)


if __name__ == "__main__":
    main()
