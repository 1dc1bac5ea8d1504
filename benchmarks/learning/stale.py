"""Compare two-sided clipping (delta) with PPO's one-sided clip, on data that is many updates old.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.stale [--seeds 3] [--updates 80] [--age 16] [--lr 2e-4] [--label NAME]

Trains `bundled:tiny` on sums in one process, once with delta = 4 and once with a delta that is never reached, from the same
weights and tasks. Each update's rollouts are sampled by the policy of `age` updates before. The first `age` updates use the
first policy's first batch. An age of 16 is async level 2 at the recipe's 8 updates per step. Each update also computes the
gradient of the other arm's loss at the same weights and data, so the two losses are compared independently of each run's
progress. An update's reward is that of fresh samples of its policy. Writes benchmarks/results/stale.json and
docs/images/stale.png, and prints a table.
"""

import argparse
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.machine import IMAGES, RESULTS, ROOT, about, save
from shoal import tasks
from shoal.config import load
from shoal.config.recipe import LearnerSection, LossSection
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.learner.batch import group_advantages
from shoal.learner.loss import denominator, policy_loss
from shoal.learner.policy import Policy
from shoal.model.sampling import rollout_seed
from shoal.model.sources import TINY, resolve
from shoal.model.tree import Tree, pack
from shoal.tasks.prompt import completion_text, prompt_tokens

TASKS = load(ROOT / "configs" / "tiny.toml").tasks
PROMPTS, GROUP, MAX_TOKENS = 16, 8, 6
ARMS = {"delta 4": 4.0, "delta off": 1e9}
BEYOND = 4.0  # a larger ratio counts as huge, in both arms
PLOTTED = {  # figures of an update, and their titles
    "grad_norm": "gradient norm, before clipping",
    "beyond": f"tokens with A < 0, ratio > {BEYOND:.0f}",
    "reward": "reward of fresh samples",
}
SPIKE = 10.0  # an update is a spike if its gradient norm exceeds this many times the median


class Stored(NamedTuple):
    """One update's rollouts: the inputs of the loss, and the mean reward."""

    trees: list[Tree]
    behaviour_N: Tensor
    advantage_N: Tensor
    reward: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--age", type=int, default=16, help="updates between sampling and training")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--label", help="write results/stale-LABEL.json instead, and no plot")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started_s = time.monotonic()
    result: dict[str, Any] = {
        **about(),
        "settings": {"age": arguments.age, "lr": arguments.lr, "prompts": PROMPTS, "group": GROUP, "arms": ARMS},
        "runs": [],
    }
    pooled: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in range(arguments.seeds):
        for arm in ARMS:
            updates = run(seed, ARMS[arm], arguments.age, arguments.lr, arguments.updates)
            pooled[arm] += updates
            run_figures = {"arm": arm, "seed": seed} | figures(updates)
            series = {name: [update[name] for update in updates] for name in PLOTTED}
            result["runs"].append(run_figures | {"updates": series})
            sys.stdout.write(f"{time.monotonic() - started_s:.0f} s {run_figures}\n")
            sys.stdout.flush()
    result["all seeds"] = {arm: figures(updates) for arm, updates in pooled.items()}
    result["off over on, same weights"] = same_weights(pooled)
    result["seconds"] = round(time.monotonic() - started_s, 1)
    name = f"stale-{arguments.label}" if arguments.label else "stale"
    save(RESULTS / f"{name}.json", result)
    if not arguments.label:
        plot(result, IMAGES / "stale.png")
    sys.stdout.write(table(result))


def run(seed: int, delta: float, age: int, lr: float, n_updates: int) -> list[dict[str, float]]:
    """Train once. Return each update's figures; fewer than requested if the run diverges or runs out of data."""
    loss = LossSection(delta=delta, beta=0.0, entropy=0.0, normalize_std=True)
    policy = Policy(resolve(TINY), LearnerSection(lr=lr, warmup_steps=0, loss=loss), "float32", "cpu", temperature=1.0)
    engine = TorchEngine("float32")
    engine.model = policy.model
    draw = random.Random(seed)
    waiting: deque[Stored] = deque()
    updates: list[dict[str, float]] = []
    for update in range(n_updates):
        fresh = sample(engine, policy, draw, seed, update)
        if len(fresh.behaviour_N):  # empty if the online filter kept nothing; then only queued data is trained on
            waiting.append(fresh)
        if not waiting:
            return updates
        old = waiting.popleft() if len(waiting) > age or not len(fresh.behaviour_N) else waiting[0]
        try:
            updates.append({"update": update, "reward": fresh.reward} | train(policy, old, loss))
        except ShoalError:
            return updates
    return updates


def sample(engine: TorchEngine, policy: Policy, draw: random.Random, seed: int, update: int) -> Stored:
    """Return rollouts of random tasks by the current policy."""
    task_set = tasks.load(TASKS)
    chosen = draw.sample(task_set.train, k=PROMPTS)
    prompts = [prompt_tokens(policy.tokenizer, TASKS, task, 0) for task in chosen]
    seeds = [[rollout_seed("stale", update, str(seed), p, g) for g in range(GROUP)] for p in range(PROMPTS)]
    groups = engine.generate(prompts, seeds, Sampling(1.0, MAX_TOKENS, (policy.tokenizer.eos_token_id,)))
    behaviour: list[float] = []
    advantages, rewards, trees = [], [], []
    graders = tasks.Graders(TASKS)
    for task, prompt, group in zip(chosen, prompts, groups, strict=True):
        texts = [completion_text(policy.tokenizer, c.tokens) for c in group]
        rewards_G = torch.tensor([grade.score for grade in graders.grade([task] * len(group), texts)])
        advantages_G = group_advantages(rewards_G, normalize_std=True)
        rewards += rewards_G.tolist()
        if not advantages_G.any():
            continue  # the online filter
        trees.append(Tree(prompt, [completion.tokens for completion in group]))
        behaviour += [logprob for completion in group for logprob in completion.logprobs]
        advantages += [advantages_G[g].expand(len(completion.tokens)) for g, completion in enumerate(group)]
    return Stored(trees, torch.tensor(behaviour), torch.cat([torch.empty(0), *advantages]), statistics.mean(rewards))


def train(policy: Policy, stored: Stored, loss: LossSection) -> dict[str, float]:
    """Make one update. Return its figures, and the gradient norm of the other arm's loss at the same weights."""
    n_tokens = len(stored.behaviour_N)
    row: dict[str, float] = {}

    def value(batch: Stored) -> Tensor:
        logp_N, _ = policy.logprobs(pack(batch.trees), with_entropy=False)
        ratio_N = torch.exp(logp_N.detach() - batch.behaviour_N)
        row["ratio_max"] = float(ratio_N.max())
        row["beyond"] = float(((ratio_N > BEYOND) & (batch.advantage_N < 0)).sum()) / n_tokens
        over = denominator(loss.kind, n_tokens, PROMPTS * GROUP, MAX_TOKENS)
        losses = {
            delta: policy_loss(
                logp_N,
                batch.behaviour_N,
                batch.advantage_N,
                denominator=over,
                settings=loss.model_copy(update={"delta": delta}),
            ).loss
            for delta in ARMS.values()
        }
        (other,) = set(ARMS.values()) - {loss.delta}
        gradients = torch.autograd.grad(losses[other], list(policy.model.parameters()), retain_graph=True)
        row["grad_norm_other"] = float(torch.nn.utils.get_total_norm(gradients))
        return losses[loss.delta]

    step = policy.step(value, [stored])
    return row | {"loss": step["loss"], "grad_norm": step["optim/grad_norm"]}


def figures(updates: list[dict[str, float]]) -> dict[str, float]:
    """Return statistics of the updates of one or several runs, and the reward over their last quarter."""
    norms = [update["grad_norm"] for update in updates]
    median = statistics.median(norms)
    late = 0.75 * max(update["update"] for update in updates)
    last = [update["reward"] for update in updates if update["update"] >= late]
    return {
        "n_updates": len(updates),
        "grad_norm_median": median,
        "grad_norm_p99": percentile(norms, 0.99),
        "grad_norm_max": max(norms),
        "spikes": sum(norm > SPIKE * median for norm in norms),
        "loss_max": max(update["loss"] for update in updates),
        "beyond_mean": statistics.mean(update["beyond"] for update in updates),
        "ratio_max": max(update["ratio_max"] for update in updates),
        "reward_last": statistics.mean(last),
    }


def same_weights(updates: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the factor by which the gradient norm is larger without delta, at each update's weights and data."""
    factors = []
    for arm in updates:
        for update in updates[arm]:
            on, off = update["grad_norm"], update["grad_norm_other"]
            factors.append(off / on if arm == "delta 4" else on / off)
    return {"median": statistics.median(factors), "p99": percentile(factors, 0.99), "max": max(factors)} | {
        f"beyond {times} times": sum(factor > times for factor in factors) for times in (2, 5, 10)
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table: one line per run, then one per arm."""
    columns = {
        "grad_norm_median": "median",
        "grad_norm_p99": "99th percentile",
        "grad_norm_max": "max",
        "spikes": f"> {SPIKE:.0f} x median",
        "loss_max": "largest loss",
        "beyond_mean": f"tokens with A < 0, r > {BEYOND:.0f}",
        "reward_last": "reward, last quarter",
    }
    lines = [["delta", "seed", *columns.values()], ["---"] * (len(columns) + 2)]
    rows = [(one["arm"], str(one["seed"]), one) for one in result["runs"]]
    for arm, seed, one in sorted(rows) + [(arm, "all", one) for arm, one in result["all seeds"].items()]:
        lines.append([arm, seed, *(f"{one[name]:.3g}" for name in columns)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + f"{result['off over on, same weights']}\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot gradient norm, huge ratios and reward by update; one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PLOTTED), figsize=(14, 3.6))
    colors = dict(zip(ARMS, ("tab:blue", "tab:red"), strict=True))
    for panel, (name, title) in zip(panels, PLOTTED.items(), strict=True):
        for one in result["runs"]:
            label = one["arm"] if one["seed"] == 0 else None
            panel.plot(one["updates"][name], color=colors[one["arm"]], lw=1, alpha=0.8, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("update")
        panel.grid(alpha=0.25)
    panels[0].set_yscale("log")
    panels[0].legend(fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
