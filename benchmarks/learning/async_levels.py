"""The paper's asynchrony ablation at a small scale: training on rollouts that are exactly 0, 1, 2 and 4 versions old.

    python -m benchmarks.learning.async_levels [--steps 40] [--seeds 0 1 2] [--levels 0 1 2 4]

`bundled:tiny` on two-digit sums in one process, with the recipe of configs/tiny.toml. Step s trains on the batch that
version s - level sampled (version 0 at first), as in the paper; a run would also allow younger ones. Seeds determine the
tasks and the samples. The claim tested: no measurable loss of reward up to level 4 (INTELLECT-2, arXiv 2505.07291,
section 4, with larger models on mathematics). Measured: the reward of each version's own samples, its mean over the last
ten versions, and held-out greedy accuracy at the end; their differences to level 0 over the seeds with 95 % intervals
(Welch's t). Levels take turns within each seed. Writes benchmarks/results/async_levels.json and
docs/images/async-levels.png.
"""

import argparse
import math
import random
import statistics
import sys
from collections import deque
from typing import Any, NamedTuple

from benchmarks.common.machine import IMAGES, RESULTS, ROOT, command_line, describe, save
from shoal import tasks
from shoal.config import load
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.learner.loss import denominator
from shoal.learner.policy import Policy
from shoal.model.sampling import rollout_seed
from shoal.model.sources import TINY, resolve
from shoal.tasks.prompt import completion_text, prompt_tokens
from shoal.watch.plot import write_png

CONFIG = load(ROOT / "configs" / "tiny.toml")
PROMPTS, GROUP = 32, 8
PATH, PICTURE = RESULTS / "async_levels.json", IMAGES / "async-levels.png"
LAST = 10  # final steps whose mean reward is compared
COLORS = {0: "#555555", 1: "#1f6fb4", 2: "#2a9d8f", 4: "#d1495b"}
T_95 = {2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, two-sided, by degrees of freedom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 4])
    arguments = parser.parse_args()
    result: dict[str, Any] = {"command": command_line(), "machine": describe(), "runs": []}
    for seed in arguments.seeds:
        for level in arguments.levels:
            result["runs"].append(Run(seed, level).figures(arguments.steps))
            save(PATH, result)
            figures = {name: value for name, value in result["runs"][-1].items() if not isinstance(value, list)}
            sys.stdout.write(f"{figures}\n")
            sys.stdout.flush()
    result["levels"] = [compare(result["runs"], level) for level in arguments.levels]
    save(PATH, result)
    draw(result["runs"])
    sys.stdout.write("".join(f"{row}\n" for row in result["levels"]))


class Sampled(NamedTuple):
    groups: list[Group]  # with different rewards
    reward: float  # of all


class Run:
    def __init__(self, seed: int, level: int) -> None:
        self.seed, self.level = seed, level
        self.draw = random.Random(seed)
        self.tasks = tasks.load(CONFIG.tasks)
        self.graders = tasks.Graders(CONFIG.tasks)
        self.policy = Policy(resolve(TINY), CONFIG.learner, "float32", "cpu", CONFIG.sampling.temperature)
        self.engine = TorchEngine("float32")
        self.engine.model = self.policy.model

    def figures(self, steps: int) -> dict[str, Any]:
        before = self.heldout()
        waiting = deque(self.sample(number=-1 - turn, version=0) for turn in range(self.level))
        rewards, norms, drift = [], [], []
        for step in range(steps):
            waiting.append(self.sample(number=step, version=step))
            rewards.append(waiting[-1].reward)
            figures = self.train(waiting.popleft().groups)
            norms.append(figures["optim/grad_norm"])
            drift.append(figures["policy/mismatch_kl"])
        return {
            "async_level": self.level,
            "seed": self.seed,
            "reward_last": statistics.mean(rewards[-LAST:]),
            "greedy_before": before,
            "greedy_after": self.heldout(),
            "grad_norm_max": max(norms),
            "rewards": rewards,
            "grad_norms": norms,
            "mismatch_kl": drift,
        }

    def sample(self, *, number: int, version: int) -> Sampled:
        """Return a batch sampled by the current policy."""
        chosen = self.draw.sample(self.tasks.train, k=PROMPTS)
        prompts = [prompt_tokens(self.policy.tokenizer, CONFIG.tasks, task, 0) for task in chosen]
        seeds = [
            [rollout_seed("levels", number + 1000, str(self.seed), p, g) for g in range(GROUP)] for p in range(PROMPTS)
        ]
        groups, rewards = [], []
        for task, prompt, group in zip(
            chosen, prompts, self.engine.generate(prompts, seeds, self.sampling(1.0)), strict=True
        ):
            texts = [completion_text(self.policy.tokenizer, c.tokens) for c in group]
            graded = [grade.score for grade in self.graders.grade([task] * len(group), texts)]
            rewards += graded
            if len(set(graded)) > 1:
                logprobs = [list(c.logprobs) for c in group]
                groups.append(Group("", version, prompt, [list(c.tokens) for c in group], logprobs, graded))
        return Sampled(groups, statistics.mean(rewards))

    def train(self, groups: list[Group]) -> dict[str, float]:
        settings = CONFIG.learner
        rows = micro_batches(groups, row_tokens=settings.row_tokens, normalize_std=settings.loss.normalize_std)
        n_tokens = sum(group.n_tokens for group in groups)
        over = denominator(settings.loss.kind, n_tokens, len(groups) * GROUP, CONFIG.sampling.max_tokens)
        figures = self.policy.update(rows, over)
        return figures | {"policy/mismatch_kl": figures["policy/mismatch_kl"] / n_tokens}

    def heldout(self) -> float:
        """Return greedy accuracy on the held-out tasks."""
        heldout = self.tasks.heldout[:256]
        prompts = [prompt_tokens(self.policy.tokenizer, CONFIG.tasks, task, 0) for task in heldout]
        groups = self.engine.generate(prompts, [[0]] * len(heldout), self.sampling(0.0))
        texts = [completion_text(self.policy.tokenizer, group[0].tokens) for group in groups]
        return statistics.mean(grade.score for grade in self.graders.grade(heldout, texts))

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, CONFIG.sampling.max_tokens, (self.policy.tokenizer.eos_token_id,))


def compare(runs: list[dict[str, Any]], level: int) -> dict[str, Any]:
    """Return means at `level`, and the difference to level 0 with its interval."""
    row: dict[str, Any] = {"async_level": level}
    for name in ("reward_last", "greedy_after"):
        values, base = ([run[name] for run in runs if run["async_level"] == of] for of in (level, 0))
        row[name] = statistics.mean(values)
        if level:
            row[f"{name}_difference"] = row[name] - statistics.mean(base)
            row[f"{name}_interval"] = half_interval(values, base)
    return row


def half_interval(a: list[float], b: list[float]) -> float:
    """Return half the width of the 95 % interval of mean(a) - mean(b), with separate variances (Welch)."""
    errors = [statistics.variance(sample) / len(sample) for sample in (a, b)]
    total = sum(errors)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(e**2 / (len(sample) - 1) for e, sample in zip(errors, (a, b), strict=True))
    return T_95[max(2, min(4, math.floor(freedom)))] * math.sqrt(total)


def draw(runs: list[dict[str, Any]]) -> None:
    """Draw each run's reward as a thin line, the mean over seeds of each level as a thick one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for level in sorted({run["async_level"] for run in runs}):
        curves = [run["rewards"] for run in runs if run["async_level"] == level]
        color = COLORS.get(level, "#7b5ea7")
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.6, alpha=0.4)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, label=f"{level} versions old")
    axes.set(xlabel="policy version", ylabel="mean reward of its samples")
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, PICTURE)


if __name__ == "__main__":
    main()
