"""From a task to prompt tokens, and from completion tokens to text: the same code for worker, validator and evaluator."""

from collections.abc import Sequence
from typing import Any

from shoal.config.tasks import TaskSection
from shoal.errors import UserError
from shoal.tasks.budget import instruction
from shoal.tasks.task import Task


class ChatTemplateError(UserError):
    """The model's tokenizer has no chat template."""


def prompt_tokens(tokenizer: Any, config: TaskSection, task: Task, target_length: int) -> list[int]:
    """The token ids of the prompt: the model's chat template around the question. Raises ChatTemplateError."""
    template = (config.source(task.source).prompt if task.source else "") or config.prompt
    content = template.replace("{question}", task.question)  # not str.format: other braces are literal
    if asked := instruction(config, target_length):
        content += f"\n{asked}"
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
