"""Measure held-out accuracy of each system's weights after the run, with one engine and one grader."""

from pathlib import Path
from typing import Any

from shoal import tasks
from shoal.config import Config
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids, load_tokenizer
from shoal.tasks.prompt import completion_text, prompt_tokens


def measure(
    config: Config, dtype: DtypeName, model: Path, versions: Path, steps: list[dict[str, Any]], every: int
) -> list[dict[str, float]]:
    """Return greedy and sampled accuracy of `model` and of each `every`-th version, with the seconds until it existed."""
    curve = []
    for version in range(0, len(steps) + 1, every):
        engine = TorchEngine(dtype, config.model.device)  # a new one, because only versions may have adapters
        engine.load(versions / f"v{version:06d}" if version else model)
        point = {"version": version, "since_launch_s": steps[version - 1]["since_launch_s"] if version else 0.0}
        for name, temperature in (("greedy", 0.0), ("sampled", config.sampling.temperature)):
            point[name] = accuracy(
                engine, config, Sampling(temperature, config.sampling.max_tokens, eos_ids(model)), model
            )
        curve.append(point)
    return curve


def accuracy(engine: TorchEngine, config: Config, sampling: Sampling, model: Path) -> float:
    """Return the share of correct answers on the first held-out tasks. `model` is the folder of the tokenizer."""
    result, tokenizer, n = tasks.load(config.tasks), load_tokenizer(model), config.evaluator.n
    graders = tasks.Graders(config.tasks)
    chosen = result.heldout[:n]
    prompts = [prompt_tokens(tokenizer, config.tasks, task, 0) for task in chosen]
    answers = engine.generate(prompts, [[number] for number in range(n)], sampling)
    texts = [completion_text(tokenizer, group[0].tokens) for group in answers]
    return sum(grade.score for grade in graders.grade(chosen, texts)) / n


def first_at(curve: list[dict[str, float]], targets: dict[str, float]) -> dict[str, float | None]:
    """Return the seconds from launch until each accuracy was first reached, or None if it never was."""
    return {
        name: next((point["since_launch_s"] for point in curve if point[name] >= target), None)
        for name, target in targets.items()
    }
