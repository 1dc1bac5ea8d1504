"""From a task to prompt tokens, and from completion tokens to a reward: the same code for worker, validator, evaluator.

Reward = grade - alpha * |target length - length| if the group has a target. The prompt states the target, as in
INTELLECT-2 (arXiv 2505.07291, section 4.1; after L1, arXiv 2503.04697).
"""

import math
from collections.abc import Sequence
from typing import Any

from shoal.config.recipe import TaskSection
from shoal.errors import ShoalError
from shoal.tasks import TaskSet
from shoal.tasks.arithmetic import Task

EPSILON = 1e-6  # rewards that differ by less count as equal


class GradeError(ShoalError):
    """A grader that breaks its contract; the message names the task."""


class ChatTemplateError(ShoalError):
    """The model's tokenizer has no chat template."""


def prompt_tokens(tokenizer: Any, config: TaskSection, task: Task, target_length: int) -> list[int]:
    """The token ids of the prompt: the model's chat template around the question. Raises ChatTemplateError."""
    content = config.prompt.replace("{question}", task.question)  # not str.format: other braces are literal
    if target_length:
        content += f"\nThink for {target_length} tokens before giving the answer."
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": content})
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except ValueError as error:  # transformers' answer to a tokenizer without one
        raise ChatTemplateError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template; use an instruct model, or put a "
            "chat_template.jinja into the model's folder"
        ) from error
    return list(encoded["input_ids"])


def completion_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def grade(tasks: TaskSet, task: Task, answer: str) -> float:
    """The grade of an answer. Raises GradeError unless it is within [0, 1]."""
    value = tasks.grade(task, answer)
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise GradeError(
            f"the grader gives {value} for task {task.id}; grades must be within [0, 1]: correct the grader"
        )
    return value


def completion_reward(
    tasks: TaskSet, tokenizer: Any, config: TaskSection, task: Task, target_length: int, tokens: Sequence[int]
) -> float:
    """The reward of one completion, given as tokens. Raises GradeError."""
    value = grade(tasks, task, completion_text(tokenizer, tokens))
    return reward(value, len(tokens), target_length, config.length_penalty)


def reward(grade: float, length: int, target_length: int, alpha: float) -> float:
    """The reward of a completion of `length` tokens with this grade."""
    return grade - (alpha * abs(target_length - length) if target_length else 0.0)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether a group with these rewards has advantages that are not all zero."""
    return max(rewards) - min(rewards) > EPSILON
