"""Whether a conversation goes on after a turn of the model, and with which tokens: the same code for worker and validator.

    the model's turn ends with an end token -> its text -> the environment of the task's source -> text -> tokens

It ends when the environment says so, after `sampling.max_turns` turns of the model, at a token limit that leaves no room for
the answer and one more token, or with a turn that is cut off.
Invariant: `reply` is a function of its arguments, as far as environments are deterministic. Tokens in, tokens out: what the
model wrote is decoded for the environment to read, and never tokenised again.
Called by worker (while it samples), validator (which compares) and evaluator.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.config import Config
from shoal.model.turns import model_spans
from shoal.tasks.environments.interface import Environment
from shoal.tasks.environments.template import Frame
from shoal.tasks.prompt import completion_text
from shoal.tasks.task import Task

Reply = Callable[
    [int, int, Sequence[int], Sequence[int]], list[int] | None
]  # what an engine asks, see `engine/protocol`


def responder(conversation: "Conversation", tasks: Sequence[Task], seeds: Sequence[Sequence[int]]) -> Reply:
    """What the environments answer, for an engine: `tasks` and `seeds` are those of the groups that it is given."""

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return conversation.reply(tasks[group], seeds[group][number], tokens, turns)

    return respond


class Conversation:
    """`environments`: by name of the tasks' source. Raises ChatTemplateError if the model cannot be answered."""

    def __init__(
        self, config: Config, environments: Mapping[str, Environment], tokenizer: Any, eos_ids: Sequence[int]
    ) -> None:
        self.max_turns = config.sampling.max_turns
        self.max_tokens = config.sampling.max_tokens
        self.environments = environments
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.frame = Frame(tokenizer, eos_ids) if self.possible else None

    @property
    def possible(self) -> bool:
        """Whether any completion may have several turns."""
        return self.max_turns > 1 and bool(self.environments)

    def reply(self, task: Task, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        """The tokens that follow a completion so far, whose last turn is the model's; None: the completion ends.

        `turns` are the lengths of the turns before the last, see `model/turns`.
        """
        environment = self.environments.get(task.source)
        if self.frame is None or environment is None or tokens[-1] not in self.eos_ids:
            return None
        spans = model_spans(turns, len(tokens))
        if len(spans) >= self.max_turns:
            return None
        said = [completion_text(self.tokenizer, tokens[start:end]) for start, end in spans]
        text = environment.respond(task, seed, said)
        if text is None:
            return None
        answer = self.frame.tokens(text)
        return answer if len(tokens) + len(answer) < self.max_tokens else None

    def fault(self, task: Task, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> str:
        """What in a finished completion the environment did not write, or wrote and is missing; empty if nothing.

        The turns must fit.
        """
        spans = model_spans(turns, len(tokens))
        for number, (_, end) in enumerate(spans):
            answer = self.reply(task, seed, tokens[:end], turns[: 2 * number]) or []
            next_turn = spans[number + 1][0] if number + 1 < len(spans) else len(tokens)
            if list(tokens[end:next_turn]) != answer:
                return f"after turn {number + 1} of {len(spans)} the environment writes {len(answer)} tokens, not these"
        return ""
