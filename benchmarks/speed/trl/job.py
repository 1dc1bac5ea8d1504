"""Write the input of the systems: the prompts of every step, and the job for peer.py and loop.py."""

import json
import random
import time
from pathlib import Path
from typing import Any

from shoal import tasks
from shoal.config import Config
from shoal.learner.policy import BETAS
from shoal.model.load import load_tokenizer
from shoal.tasks.prompt import prompt_tokens


def write_job(folder: Path, config: Config, model: Path, versions: Path | None, **more: Any) -> float:
    """Write job.json and prompts.jsonl into `folder`. Return the time of launch. `versions` is the folder for weights.

    `more` also goes into job.json: threads, dtype, device, save_every, settings.
    """
    export(config, model, folder / "prompts.jsonl")
    learner, launched_s = config.learner, time.time()
    job = more | {
        "model": str(model),
        "prompts": str(folder / "prompts.jsonl"),
        "out": str(folder / "out.json"),
        "versions": str(versions) if versions else "",
        "steps": config.run.steps,
        "seed": config.run.seed,
        "launched_s": launched_s,
        "target_length": target_length(config),
        "tasks": config.tasks.model_dump(mode="json"),
        "config": config.model_dump(mode="json", exclude_none=True),
        "recipe": {
            "prompts": config.coordinator.prompts_per_step,
            "group_size": config.sampling.group_size,
            "max_tokens": config.sampling.max_tokens,
            "temperature": config.sampling.temperature,
            "updates": learner.optimizer_steps_per_step,
            "lr": learner.lr,
            "warmup_steps": learner.warmup_steps,
            "lora": learner.lora and learner.lora.model_dump(),
            "betas": BETAS,
            "grad_clip": learner.grad_clip,
            "epsilon": learner.loss.epsilon,
            "delta": learner.loss.delta,
            "normalize_std": learner.loss.normalize_std,
        },
    }
    (folder / "job.json").write_text(json.dumps(job))
    return launched_s


def export(config: Config, model: Path, path: Path) -> None:
    """Write the prompts of every step, as text and as the tokens that the text must encode to."""
    tokenizer, train = load_tokenizer(model), tasks.load(config.tasks).train
    with path.open("w") as file:
        for step in range(config.run.steps):
            drawn = random.Random(f"{config.run.seed} {step}")  # noqa: S311
            for task in drawn.sample(train, config.coordinator.prompts_per_step):
                ids = prompt_tokens(tokenizer, config.tasks, task, target_length(config))
                line = {"prompt": tokenizer.decode(ids), "tokens": ids}
                line |= {"task": task.id, "answer": task.answer, "reward_name": task.reward}
                file.write(json.dumps(line) + "\n")


def target_length(config: Config) -> int:
    """Return the workload's only length target, or 0 if it has none."""
    return (config.tasks.length_targets or [0])[0]
