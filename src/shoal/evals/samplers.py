"""Where completions come from: the interface, and an engine on this machine. `remote` is the other one.

Invariant: a completion's noise follows from its own seed, and an engine's batches are always the same ones. So a resumed
evaluation gives what an uninterrupted one would have given, bit for bit on one machine.
Called by `evaluate`.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.engine.protocol import Engine
from shoal.engine.protocol import Sampling as EngineSampling
from shoal.evals.completions import Answer, Asked, EvalUsageError, Key

Done = Callable[[Sequence[tuple[Asked, Answer]]], None]


@dataclass(frozen=True)
class Sampling:
    """How a suite's completions are sampled: greedily at temperature 0."""

    temperature: float
    max_tokens: int


class Sampler(Protocol):
    def answer(self, asked: Sequence[Asked], sampling: Sampling, known: Container[Key], done: Done) -> None:
        """Answer all that is asked and not yet known. `done` gets answers as they come, in any order."""
        ...


class EngineSampler:
    """An engine on this machine. `batch`: completions computed together."""

    def __init__(self, engine: Engine, folder: Path, batch: int) -> None:
        from shoal.model.load import eos_ids, load_tokenizer

        self.engine = engine
        self.folder = folder
        self.batch = batch
        self.tokenizer = load_tokenizer(folder)
        self.eos_ids = eos_ids(folder)
        engine.load(folder)

    def answer(self, asked: Sequence[Asked], sampling: Sampling, known: Container[Key], done: Done) -> None:
        """Raises EvalUsageError if prompt and completion exceed the model's positions."""
        settings = EngineSampling(sampling.temperature, sampling.max_tokens, self.eos_ids)
        prompts = {message: prompt_of(self.tokenizer, message) for message in {one.message for one in asked}}
        check_room(self.folder, max(map(len, prompts.values()), default=0), sampling.max_tokens)
        for start in range(0, len(asked), self.batch):
            chunk = asked[start : start + self.batch]
            if all(one.key in known for one in chunk):
                continue  # a chunk that is known in part is computed again whole: batches stay the same
            by_task: dict[str, list[Asked]] = {}
            for one in chunk:
                by_task.setdefault(one.task, []).append(one)
            groups = list(by_task.values())
            seeds = [[one.seed for one in group] for group in groups]
            found = self.engine.generate([prompts[group[0].message] for group in groups], seeds, settings)
            done(
                [
                    (one, self._read(completion.tokens))
                    for group, completions in zip(groups, found, strict=True)
                    for one, completion in zip(group, completions, strict=True)
                ]
            )

    def _read(self, tokens: Sequence[int]) -> Answer:
        from shoal.tasks.prompt import completion_text

        return Answer(completion_text(self.tokenizer, tokens), len(tokens), tokens[-1] in self.eos_ids)


def prompt_of(tokenizer: Any, message: str) -> list[int]:
    """The chat template around one user message, as in training. Raises ChatTemplateError."""
    from shoal.config.tasks import TaskSection
    from shoal.tasks.prompt import prompt_tokens
    from shoal.tasks.task import Task

    return prompt_tokens(tokenizer, TaskSection(), Task(id="", question=message, answer=""), 0)


def check_room(folder: Path, longest_prompt: int, max_tokens: int) -> None:
    """Raises EvalUsageError, naming the most tokens that fit."""
    from shoal.model.sources import positions, read_config

    most = positions(read_config(str(folder.resolve()), fetch=False))
    if most is None or longest_prompt + max_tokens <= most:
        return
    if longest_prompt >= most:
        raise EvalUsageError(
            f"a prompt of {longest_prompt} tokens exceeds the {most} positions of the model in {folder}"
        )
    raise EvalUsageError(
        f"the longest prompt has {longest_prompt} tokens and completions may have {max_tokens}, but the model in {folder} "
        f"has {most} positions for both; add --max-tokens {most - longest_prompt}"
    )
