"""From a task to prompt tokens, and from completion tokens to a reward: the same code for worker, validator, evaluator.

Reward = grade - alpha * |target length - length| where a target was drawn, written into the prompt as INTELLECT-2 does
(arXiv 2505.07291, section 4.1; after L1, arXiv 2503.04697).
"""

from collections.abc import Sequence
from typing import Any

from shoal.config.recipe import TaskSection
from shoal.errors import ShoalError
from shoal.tasks.arithmetic import Task

EPSILON = 1e-6  # rewards closer than this count as equal


class ChatTemplateError(ShoalError):
    """The model's tokenizer has no chat template."""


def prompt_tokens(tokenizer: Any, config: TaskSection, task: Task, target_length: int) -> list[int]:
    """The token ids a completion of `task` follows: the model's chat template around the question.

    Raises ChatTemplateError.
    """
    content = config.prompt.replace("{question}", task.question)  # other braces are the prompt's own
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


def reward(grade: float, length: int, target_length: int, alpha: float) -> float:
    """The reward of one completion of `length` tokens."""
    return grade - (alpha * abs(target_length - length) if target_length else 0.0)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether a group of completions with these rewards teaches which are better."""
    return max(rewards) - min(rewards) > EPSILON
