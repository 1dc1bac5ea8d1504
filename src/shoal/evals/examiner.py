"""The one loop that lets a model answer tasks and grades what it wrote: of the evaluator and of the offline filter.

Invariant: prompts, conversations and rewards are those of a run, so what is measured here is what training would see.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from shoal.config import Config
from shoal.engine.protocol import Completion, Engine, Sampling
from shoal.model.load import eos_ids, load_tokenizer
from shoal.model.turns import last_turn
from shoal.tasks import Grade, Graders, Task
from shoal.tasks.budget import in_turn
from shoal.tasks.environments import Conversation, close, environments_of, responder
from shoal.tasks.prompt import completion_text, prompt_tokens


class Examiner:
    """Use as a context manager, or call `close`."""

    def __init__(self, config: Config, files: Mapping[str, bytes]) -> None:
        """`files`: those of the task set."""
        self.config = config
        self.graders = Graders(config.tasks, files=files)
        self.environments = environments_of(config, files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that grade and answer."""
        self.graders.close()
        close(self.environments)

    def load(self, engine: Engine, folder: Path) -> None:
        """Examine the model in `folder` from now on."""
        engine.load(folder)
        self.engine, self.ends = engine, eos_ids(folder)
        self.tokenizer: Any = load_tokenizer(folder)
        self.conversation = Conversation(self.config, self.environments, self.tokenizer, self.ends)

    def ask(
        self, asked: Sequence[Task], first: int, seeds: Sequence[Sequence[int]], temperature: float
    ) -> tuple[list[list[Completion]], list[list[Grade]]]:
        """Return the completions of each task, one for each of its seeds, and their grades.

        `first`: the number of the first task, from which target lengths follow.
        """
        prompts = [
            prompt_tokens(self.tokenizer, self.config.tasks, task, in_turn(self.config.tasks, number))
            for number, task in enumerate(asked, start=first)
        ]
        sampling = Sampling(temperature, self.config.sampling.max_tokens, self.ends)
        groups = self.engine.generate(prompts, seeds, sampling, responder(self.conversation, asked, seeds))
        repeated = [task for task, group in zip(asked, groups, strict=True) for _ in group]
        texts = [completion_text(self.tokenizer, last_turn(one.turns, one.tokens)) for group in groups for one in group]
        grades = iter(self.graders.grade(repeated, texts))
        return groups, [[next(grades) for _ in group] for group in groups]
