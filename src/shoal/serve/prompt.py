"""From messages to prompt tokens, as the model's template and, if asked, the run's training say.

Invariant: the tokens follow from (messages, version) alone, so that a verifier makes them again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config import Config
from shoal.serve.errors import PromptError
from shoal.serve.versions import LoadedModel
from shoal.tasks.budget import instruction

Message = Mapping[str, Any]  # role, content; of tools also tool_calls, tool_call_id, name


def encode(held: LoadedModel, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[int, ...]:
    """The prompt's tokens, up to where the assistant begins. Raises PromptError.

    Seconds for a text of megabytes: not for the event loop. What cannot fit is refused before it is read.
    """
    check_length(held, characters([*messages, *tools]))
    rendered = _rendered(held.tokenizer, messages, tools, add_generation_prompt=True, return_dict=True)
    if not (tokens := tuple(rendered["input_ids"])):
        raise PromptError("the model's chat template makes nothing of these messages")
    return tokens


def check_length(held: LoadedModel, count: int) -> None:
    """Raises PromptError for a text of `count` characters that no tokens of this model could hold."""
    if count > held.characters:
        raise PromptError(
            f"This model's maximum context length is {held.positions} tokens; the prompt has {count} characters, and "
            f"{held.characters} are the most that could fit.",
            code="context_length_exceeded",
        )


def characters(value: Any) -> int:
    """Of all texts in a JSON value, its keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(characters(key) + characters(one) for key, one in value.items())
    if isinstance(value, Sequence):
        return sum(map(characters, value))
    return 1


def written(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    """A finished conversation as the template writes it. Raises PromptError."""
    return str(_rendered(tokenizer, messages, tools, tokenize=False))


def _rendered(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message], **how: Any) -> Any:
    if not tokenizer.chat_template:
        raise PromptError("this model has no chat template; use /v1/completions")
    given = {"tools": [dict(tool) for tool in tools] or None, **how}
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], **given)
    except Exception as error:  # noqa: BLE001 - a template is a program of the model's: it raises what it likes
        raise PromptError(f"the model's chat template refuses these messages: {str(error)[:200]}") from error


def as_trained(config: Config, messages: Sequence[Message], target: int) -> list[Message]:
    """The messages with the run's system prompt, its template around what the user says, and the last target length."""
    section = config.tasks
    found: list[Message] = []
    if section.system and not any(message["role"] == "system" for message in messages):
        found.append({"role": "system", "content": section.system})
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user":
            content = section.prompt.replace("{question}", content)
            if number == last and (asked := instruction(target)):
                content += f"\n{asked}"
        found.append({**message, "content": content})
    return found
