"""Turn messages into prompt tokens with the model's chat template, optionally formatted as in the run's training.

Invariant: the tokens depend only on the messages and the version, so a verifier can recompute them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config import Config
from shoal.serve.errors import PromptError
from shoal.serve.versions import LoadedModel
from shoal.tasks.budget import instruction

Message = Mapping[str, Any]  # role and content


def encode(loaded: LoadedModel, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the prompt's tokens, up to the start of the assistant's turn. Raise PromptError.

    Do not call this in the event loop, because tokenizing megabytes takes seconds. Text that cannot fit is refused
    before it is tokenized.
    """
    check_length(loaded, sum(len(message["content"]) for message in messages))
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        raise PromptError("this model has no chat template; use /v1/completions")
    plain = [dict(message) for message in messages]
    try:
        rendered = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # noqa: BLE001 - a template is third-party code and may raise anything
        raise PromptError(f"the model's chat template refuses these messages: {str(error)[:200]}") from error
    if not (tokens := tuple(rendered["input_ids"])):
        raise PromptError("the model's chat template renders these messages to nothing")
    check_tokens(loaded, tokens)
    return tokens


def check_length(loaded: LoadedModel, count: int) -> None:
    """Raise PromptError if no tokenization of `count` characters can fit the context."""
    if count > loaded.max_characters:
        raise PromptError(
            f"This model's maximum context length is {loaded.positions} tokens; the prompt has {count} characters, and "
            f"{loaded.max_characters} is the maximum that could fit.",
            code="context_length_exceeded",
        )


def check_tokens(loaded: LoadedModel, tokens: Sequence[int]) -> None:
    """Raise PromptError if the model has no embedding for a token. A tokenizer may have more tokens than its model."""
    vocabulary = loaded.engine.model.config.vocab_size
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocabulary:
            raise PromptError(f"the prompt has token id {token}; this model's ids are 0 to {vocabulary - 1}")


def as_trained(config: Config, messages: Sequence[Message], target: int) -> list[Message]:
    """Format messages as in training, with the run's system prompt and with its template around user messages.

    Append the target length to the last user message.
    """
    section = config.tasks
    rendered: list[Message] = []
    if section.system and not any(message["role"] == "system" for message in messages):
        rendered.append({"role": "system", "content": section.system})
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for index, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user":
            content = section.prompt.replace("{question}", content)
            if index == last and (suffix := instruction(target)):
                content += f"\n{suffix}"
        rendered.append({**message, "content": content})
    return rendered
