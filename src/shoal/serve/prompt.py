"""Render messages to prompt tokens with the model's chat template, optionally formatted as in the run's training.

Invariant: the tokens depend on (messages, version) alone, so a verifier can recompute them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config import Config
from shoal.serve.errors import PromptError
from shoal.serve.versions import LoadedModel
from shoal.tasks.budget import instruction

Message = Mapping[str, Any]  # role, content; with tools also tool_calls, tool_call_id, name


def encode(loaded: LoadedModel, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[int, ...]:
    """Return the prompt's tokens, up to where the assistant's turn begins. Raise PromptError.

    Takes seconds for megabytes of text: do not call it in the event loop. Text that cannot fit is refused before tokenizing.
    """
    check_length(loaded, count_characters([*messages, *tools]))
    rendered = _apply_template(loaded.tokenizer, messages, tools, add_generation_prompt=True, return_dict=True)
    if not (tokens := tuple(rendered["input_ids"])):
        raise PromptError("the model's chat template renders these messages to nothing")
    return tokens


def check_length(loaded: LoadedModel, count: int) -> None:
    """Raise PromptError if no tokenization of `count` characters can fit the context."""
    if count > loaded.characters:
        raise PromptError(
            f"This model's maximum context length is {loaded.positions} tokens; the prompt has {count} characters, and "
            f"{loaded.characters} is the maximum that could fit.",
            code="context_length_exceeded",
        )


def count_characters(value: Any) -> int:
    """Count the characters of all strings in a JSON value, keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(count_characters(key) + count_characters(item) for key, item in value.items())
    if isinstance(value, Sequence):
        return sum(map(count_characters, value))
    return 1


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    """Render a finished conversation to text. Raise PromptError."""
    return str(_apply_template(tokenizer, messages, tools, tokenize=False))


def _apply_template(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message], **options: Any) -> Any:
    if not tokenizer.chat_template:
        raise PromptError("this model has no chat template; use /v1/completions")
    arguments = {"tools": [dict(tool) for tool in tools] or None, **options}
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], **arguments)
    except Exception as error:  # noqa: BLE001 - a template is third-party code and may raise anything
        raise PromptError(f"the model's chat template refuses these messages: {str(error)[:200]}") from error


def as_trained(config: Config, messages: Sequence[Message], target: int) -> list[Message]:
    """Add the run's system prompt, its template around each user message, and the target length to the last one."""
    section = config.tasks
    rendered: list[Message] = []
    if section.system and not any(message["role"] == "system" for message in messages):
        rendered.append({"role": "system", "content": section.system})
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user":
            content = section.prompt.replace("{question}", content)
            if number == last and (suffix := instruction(target)):
                content += f"\n{suffix}"
        rendered.append({**message, "content": content})
    return rendered
