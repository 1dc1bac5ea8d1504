"""Generates answers to tasks and grades them, for the evaluator and the offline filter.

Invariant: prompts, conversations and rewards are the same as in training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from shoal.config import Config
from shoal.engine.protocol import Completion, Engine, Sampling
from shoal.model.load import eos_ids, load_tokenizer
from shoal.model.turns import last_turn
from shoal.tasks import Grade, Graders, Task
from shoal.tasks.budget import cycled_target
from shoal.tasks.environments import Conversation, close, environments_of, responder
from shoal.tasks.prompt import completion_text, prompt_tokens


class Examiner:
    """Answers and grades tasks with one model. Use as a context manager, or call `close`."""

    def __init__(self, config: Config, files: Mapping[str, bytes]) -> None:
        """`files` maps each file name of the task set's user code to its contents."""
        self.config = config
        self.graders = Graders(config.tasks, files=files)
        self.environments = environments_of(config, files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the grader and environment processes."""
        self.graders.close()
        close(self.environments)

    def load(self, engine: Engine, folder: Path) -> None:
        """Load the model in `folder`."""
        engine.load(folder)
        self.engine, self.ends = engine, eos_ids(folder)
        self.tokenizer: Any = load_tokenizer(folder)
        self.conversation = Conversation(self.config, self.environments, self.tokenizer, self.ends)

    def prompt(self, task: Task, number: int) -> list[int]:
        """Return the prompt of `task`. Its index `number` determines its target length."""
        return prompt_tokens(self.tokenizer, self.config.tasks, task, cycled_target(self.config.tasks, number))

    def ask(
        self, batch: Sequence[Task], first: int, seeds: Sequence[Sequence[int]], temperature: float
    ) -> tuple[list[list[Completion]], list[list[Grade]]]:
        """Return each task's completions, one per seed, and their grades.

        `first` is the index of the batch's first task. A task's index determines its target length.
        """
        prompts = [self.prompt(task, number) for number, task in enumerate(batch, start=first)]
        sampling = Sampling(temperature, self.config.sampling.max_tokens, self.ends)
        groups = self.engine.generate(prompts, seeds, sampling, responder(self.conversation, batch, seeds))
        repeated = [task for task, group in zip(batch, groups, strict=True) for _ in group]
        texts = [
            completion_text(self.tokenizer, last_turn(completion.turns, completion.tokens))
            for group in groups
            for completion in group
        ]
        grades = iter(self.graders.grade(repeated, texts))
        return groups, [[next(grades) for _ in group] for group in groups]
