"""Shoal without verification: one process that generates, grades and trains with its own weights.

    python -m benchmarks.speed.trl.loop JOB.json

`__main__.py` starts this. No real run works like it. It shows the cost of generation and training alone, on TRL's prompts.
JOB.json is that of `peer.py` without TRL's settings. The engine and the learner's update are those of `shoal run`. After
each update, the new weights are copied into the engine in memory.
"""

import json
import sys
import time
from pathlib import Path

import torch

from shoal import tasks
from shoal.config import parse
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.learner import updates
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.model.load import eos_ids, load_tokenizer, save_model
from shoal.model.sampling import rollout_seed
from shoal.tasks.budget import reward
from shoal.tasks.prompt import completion_text


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    config = parse(job["config"])
    folder = Path(job["model"])
    lines = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    tokenizer = load_tokenizer(folder)
    graders = tasks.Graders(config.tasks)
    source = config.tasks.sources[0].label
    policy = Policy(folder, config.learner, job["dtype"], job["device"], config.sampling.temperature)
    engine = TorchEngine(job["dtype"], job["device"])
    engine.load(folder)
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, eos_ids(folder))
    size, prompts = config.sampling.group_size, config.coordinator.prompts_per_step
    ready_s, off_s, steps = time.time() - job["launched_s"], 0.0, []
    for step in range(job["steps"]):
        started_s, started_cpu_s = time.time(), time.process_time()
        batch = lines[step * prompts : (step + 1) * prompts]
        seeds = [[rollout_seed("benchmark", step, "", 0, i * size + g) for g in range(size)] for i in range(prompts)]
        generated = engine.generate([line["tokens"] for line in batch], seeds, sampling)
        generated_s, generated_cpu_s = time.time(), time.process_time()
        grades = []
        for line, group in zip(batch, generated, strict=True):
            task = tasks.Task(line["task"], "", line["answer"], source, reward=line["reward_name"])
            texts = [completion_text(tokenizer, c.tokens) for c in group]
            grades.append([grade.score for grade in graders.grade([task] * len(group), texts)])
        groups = []
        for line, group, values in zip(batch, generated, grades, strict=True):
            pairs = zip(values, group, strict=True)
            rewards = [
                reward(value, len(completion.tokens), job["target_length"], config.tasks) for value, completion in pairs
            ]
            groups.append(as_group(line["tokens"], group, rewards))
        n_tokens = sum(group.n_tokens for group in groups)
        updates.train(policy, groups, config)
        with torch.no_grad():
            for own, new in zip(engine.model.parameters(), policy.model.parameters(), strict=True):
                own.copy_(new)
        ended_s = time.time()
        steps.append(
            {
                "step": step + 1,
                "seconds": ended_s - started_s,
                "cpu_s": time.process_time() - started_cpu_s,
                "generate_s": generated_s - started_s,
                "generate_cpu_s": generated_cpu_s - started_cpu_s,
                "since_launch_s": ended_s - job["launched_s"] - off_s,
                "completions": size * prompts,
                "tokens": n_tokens,
                "grade_mean": sum(map(sum, grades)) / (size * prompts),
            }
        )
        if job["versions"] and (step + 1) % job["save_every"] == 0:
            folder_of = Path(job["versions"]) / f"v{step + 1:06d}"
            save_model(policy.model, policy.tokenizer, folder_of, policy.published(), policy.stored)
        off_s += time.time() - ended_s
    Path(job["out"]).write_text(
        json.dumps({"ready_s": ready_s, "dtype": job["dtype"], "steps": steps}, indent=1) + "\n"
    )


def as_group(prompt: list[int], completions: list[Completion], rewards: list[float]) -> Group:
    return Group(
        submission="",
        policy_version=0,
        prompt=prompt,
        completions=[c.tokens for c in completions],
        behaviour=[c.logprobs for c in completions],
        rewards=rewards,
    )


if __name__ == "__main__":
    main()
