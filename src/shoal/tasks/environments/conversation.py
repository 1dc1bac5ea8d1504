"""Multi-turn conversations: decide whether a completion continues after a turn of the model, and with which tokens.

    the model's turn ends with an end token -> its text -> the environment of the task's source -> text -> tokens

A conversation ends if the environment ends it, after `sampling.max_turns` turns of the model, if a turn is cut off, or
if the token limit leaves no room for the answer and one more token.
Invariants: if `Environment.respond` depends only on its arguments, so does `reply`. `find_fault` never calls an answer
a lie if an honest machine could give it. The model's output is decoded for the environment, but never tokenized again.
Worker, validator and evaluator use this code.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config import Config
from shoal.model.turns import model_spans
from shoal.tasks.prompt import TurnFrame, completion_text
from shoal.tasks.task import Environment, Task

log = logging.getLogger(__name__)
Reply = Callable[[int, int, Sequence[int], Sequence[int]], list[int] | None]  # see `Respond` in `engine/protocol`


def responder(conversation: "Conversation", tasks: Sequence[Task], seeds: Sequence[Sequence[int]]) -> Reply:
    """Return the engine's `Respond` function for groups with these `tasks` and `seeds`."""

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return conversation.reply(tasks[group], seeds[group][number], tokens, turns)

    return respond


@dataclass(frozen=True)
class Fault:
    """An answer that differs from the environment's. It is a `lie` if no honest machine would give it."""

    detail: str
    lie: bool


class Conversation:
    """Continues completions with the answers of environments.

    `environments`: by source name. Raise ChatTemplateError if the model's template cannot express an answer.
    """

    def __init__(
        self, config: Config, environments: Mapping[str, Environment], tokenizer: Any, eos_ids: Sequence[int]
    ) -> None:
        self.max_turns = config.sampling.max_turns
        self.max_tokens = config.sampling.max_tokens
        self.environments = environments
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.warned = False  # whether it has warned that an answer does not fit
        self.multi_turn = self.max_turns > 1 and bool(environments)
        self.frame = TurnFrame(tokenizer, eos_ids) if self.multi_turn else None

    def reply(self, task: Task, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        """Return the environment's tokens after the model's last turn, or None if the completion ends.

        `turns`: the lengths of the turns before the last, see `model/turns`.
        """
        if (open_turn := self._open_turn(task, tokens, turns)) is None:
            return None
        environment, texts = open_turn
        text = environment.respond(task.served(), seed, texts)
        if text is None:
            return None
        answer = self._tokens(text, len(tokens))
        if not answer and not self.warned:
            self.warned = True
            log.warning(
                "an environment's answer does not fit into sampling.max_tokens = %d, so the completion ends before it; if "
                "this happens often, raise the limit",
                self.max_tokens,
            )
        return answer or None

    def find_fault(self, task: Task, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> Fault | None:
        """Return how a finished completion differs from the environment's answers; None if it does not differ.

        Of several differences, return the first lie, or else the first difference. `turns` must fit `tokens`.
        """
        spans = model_spans(turns, len(tokens))
        faults = []
        for number, (_, end) in enumerate(spans):
            before = turns[: 2 * number]
            answer = self.reply(task, seed, tokens[:end], before) or []
            next_turn = spans[number + 1][0] if number + 1 < len(spans) else len(tokens)
            reported = list(tokens[end:next_turn])
            if reported != answer:
                detail = (
                    f"after turn {number + 1} of {len(spans)}, the environment's answer of {len(answer)} tokens "
                    f"differs from the {len(reported)} tokens in the completion"
                )
                open_turn = self._open_turn(task, tokens[:end], before)
                faults.append(Fault(detail, lie=open_turn is None or open_turn[0].repeatable))
        return next((fault for fault in faults if fault.lie), faults[0] if faults else None)

    def _open_turn(
        self, task: Task, tokens: Sequence[int], turns: Sequence[int]
    ) -> tuple[Environment, list[str]] | None:
        """Return the environment to call and the text of each turn, or None if the completion ends."""
        environment = self.environments.get(task.source)
        if self.frame is None or environment is None or tokens[-1] not in self.eos_ids:
            return None
        spans = model_spans(turns, len(tokens))
        if len(spans) >= self.max_turns:
            return None
        return environment, [completion_text(self.tokenizer, tokens[start:end]) for start, end in spans]

    def _tokens(self, text: str, length: int) -> list[int]:
        """Return an answer's tokens; empty if they do not fit after the `length` tokens before them."""
        assert self.frame is not None
        answer = self.frame.tokens(text)
        return answer if length + len(answer) < self.max_tokens else []
