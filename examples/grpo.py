"""A whole learning run in one process: a loop of your own, built from Shoal's parts.

    python examples/grpo.py [STEPS] [SECTION.KEY=VALUE ...]      python examples/grpo.py 24 learner.loss.kind=cispo

bundled:tiny learns to add two-digit numbers. The share of right answers rises from a fifth to more than a third within a
minute or two on two cores. Nothing is proven or checked, because nobody else computes. `one_step.py` shows that part.
`shoal run configs/tiny.toml` is the same run with workers that nobody has to trust.
"""

import sys
import tempfile
from pathlib import Path

from shoal import tasks
from shoal.config import load
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.learner.sft.tiny import tiny
from shoal.learner.updates import train
from shoal.model.load import eos_ids
from shoal.tasks.budget import reward, rewards_differ
from shoal.tasks.derive import plan_groups
from shoal.tasks.prompt import completion_text, prompt_tokens

config = load(Path("tiny"), [f"run.steps={(sys.argv[1:] or ['24'])[0]}", *sys.argv[2:]])  # configs/tiny.toml
task_set, graders = tasks.load(config.tasks), tasks.Graders(config.tasks)
policy = Policy(tiny(), config.learner, "float32", "cpu", config.sampling.temperature)
engine, versions = TorchEngine("float32"), Path(tempfile.mkdtemp())
sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, eos_ids(tiny()))


def rollouts(step, weights):
    """Yield the step's groups: some tasks, several completions of each by these weights, and their rewards."""
    drawn = {"run": "grpo", "step": step, "submission": 0, "worker": "me", "policy_digest": "", "nonce": ""}
    plans = plan_groups(
        **drawn,
        groups=config.coordinator.prompts_per_step,
        group_size=config.sampling.group_size,
        pick=task_set.pick,
        length_targets=config.tasks.length_targets,
    )
    chosen = [task_set.train[plan.task_index] for plan in plans]
    prompts = [prompt_tokens(policy.tokenizer, config.tasks, t, p.target_length) for t, p in zip(chosen, plans)]
    engine.load(weights)
    for task, plan, prompt, group in zip(
        chosen, plans, prompts, engine.generate(prompts, [plan.seeds for plan in plans], sampling)
    ):
        grades = graders.grade([task] * len(group), [completion_text(policy.tokenizer, one.tokens) for one in group])
        yield Group(
            submission="",
            policy_version=step,
            prompt=prompt,
            completions=[one.tokens for one in group],
            behaviour=[one.logprobs for one in group],
            rewards=[
                reward(grade.score, len(one.tokens), plan.target_length, config.tasks)
                for grade, one in zip(grades, group)
            ],
        )


for step in range(config.run.steps):
    policy.write(versions / f"v{step}")
    groups = list(rollouts(step, versions / f"v{step}"))
    mean = sum(sum(group.rewards) / len(group.rewards) for group in groups) / len(groups)
    useful = [group for group in groups if rewards_differ(group.rewards)]
    train(policy, useful, config)
    print(f"step {step + 1:2}: reward {mean:.3f}, {len(useful)} of {len(groups)} groups are useful", flush=True)

policy.write(versions / "trained")
print(f"the trained model is in {versions / 'trained'}")
