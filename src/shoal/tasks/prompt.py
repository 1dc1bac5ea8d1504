"""Text to tokens and back: prompts, completions, and an environment's answers between turns of the model.

    ... 12*7)  <|im_end|>  \\n <|im_start|>user \\n  84  <|im_end|> \\n <|im_start|>assistant \\n  ...
    the model's tokens     the tokens of the environment's answer

The answer becomes a user message, which every template supports. `TurnFrame` renders a conversation of placeholder
messages to find the template's text around an answer.
Invariants: worker, validator and evaluator use this code. An answer cannot contain control tokens, because their names
are deleted from its text.
Left out: templates that rewrite earlier turns, for example to drop reasoning. The model's own tokens stay unchanged.
"""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from shoal.config.tasks import TaskSection
from shoal.errors import ModelError
from shoal.tasks.budget import instruction
from shoal.tasks.task import Task

SENTINELS = ("firstquestion", "firstanswer", "secondquestion")
ROLES = ("user", "assistant", "user")


class ChatTemplateError(ModelError):
    """The model's tokenizer has no chat template, or it cannot render a prompt."""


def prompt_tokens(tokenizer: Any, config: TaskSection, task: Task, target_length: int) -> list[int]:
    """Return the token ids of the prompt: the model's chat template around the question. Raise ChatTemplateError."""
    content = config.prompt.replace("{question}", task.question)  # not str.format, because other braces are literal
    if length_instruction := instruction(target_length):
        content += f"\n{length_instruction}"
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": content})
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except ValueError as error:  # transformers' error for a tokenizer without a template
        raise ChatTemplateError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template; use an instruct model, or put a "
            "chat_template.jinja into the model's folder"
        ) from error
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template of {tokenizer.name_or_path} refuses a prompt ({error})") from error
    return list(encoded["input_ids"])


def completion_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


# --- answers of an environment ----------------------------------------------------------------------------------------


class TurnFrame:
    """The template's text around an answer. Raise ChatTemplateError if it cannot be determined."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        after_turn, self.after = _around(tokenizer)
        ends = {tokenizer.decode([token]): token for token in eos_ids}
        for end, token in ends.items():
            if end and after_turn.startswith(end):
                self.end, self.end_id = end, token
                self.before = after_turn.removeprefix(end)
                break
        else:
            raise _cannot_answer(
                f"the chat template of {tokenizer.name_or_path} writes {after_turn[:40]!r} after the assistant's message, "
                f"which begins with none of the end tokens {sorted(ends)} (eos_token_id in generation_config.json)"
            )
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.control = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self.tokens("0")

    def tokens(self, answer: str) -> list[int]:
        """Return the tokens between the end token of one turn and the start of the model's next turn."""
        text = self.end + self.before + delete_all(self.control, answer) + self.after
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        first, *rest = ids
        if first != self.end_id or not rest:
            name = self.tokenizer.name_or_path
            raise _cannot_answer(f"the tokenizer of {name} reads the end token {self.end!r} as another token ({first})")
        return rest


def delete_all(names: Sequence[str], text: str) -> str:
    """Delete every name in `names` from the text, including names that a deletion creates."""
    changed = True
    while changed:
        before = text
        for name in names:
            text = text.replace(name, "")
        changed = text != before
    return text


def _cannot_answer(reason: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"{reason}: no environment can answer this model; remove the source's environment, or use a chat model"
    )


def _around(tokenizer: Any) -> tuple[str, str]:
    """Return the template's text between an answer and the next question, and between that question and its answer."""
    messages = [{"role": role, "content": text} for role, text in zip(ROLES, SENTINELS, strict=True)]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (ValueError, TemplateError) as error:
        reason = f"the chat template of {tokenizer.name_or_path} does not render a second question ({error})"
        raise _cannot_answer(reason) from error
    if any(text.count(sentinel) != 1 for sentinel in SENTINELS):
        raise _cannot_answer(f"the chat template of {tokenizer.name_or_path} does not write every message once")
    _, _, rest = text.partition(SENTINELS[1])
    between, _, after = rest.partition(SENTINELS[2])
    return between, after
