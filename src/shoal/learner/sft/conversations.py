"""Reads and encodes conversations for supervised fine-tuning. Only tokens that the assistant wrote are trained on.

    examples/chat.jsonl, ./data/chat.parquet   a local .jsonl, .jsonl.gz or .parquet file
    org/name                                   files of a hub data set with "train" in their names
    org/name:data/train-*.parquet              files of a hub data set that match the pattern

A row holds `messages`, a list of {"role", "content"}, or it holds `prompt` and `completion`, which are the texts of a
user message and an assistant message. An optional `tools` is passed to the chat template. Other columns are ignored.

The trained span of an assistant's turn runs from the first token after the generation prompt to the token that ends the
turn. To locate the spans, the model's chat template is applied to prefixes of the conversation:

    up to the turn, with generation prompt    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    up to and including the turn              <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nYo<|im_end|>\\n
    trained                                                                                        Yo<|im_end|>

Invariant: every row gives a conversation, or an error that names its file and row. The tokens before a trained token are
the tokens that generation would see. If the template marks the assistant's text with {% generation %}, the marks give
the spans. Otherwise it is an error if the whole conversation does not begin with the tokens of each prefix, because
then the template rewrites earlier turns, or tokens merge across the boundary.
Left out: images and audio; other field names ("from", "value"); text without a chat template; per-message weights.
"""

from __future__ import annotations  # array[int] fails at run time before Python 3.12

import re
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2
import torch
from torch import Tensor

from shoal.errors import UserError, user_path
from shoal.model.sources import HubError, call_hub, data_files
from shoal.model.tree import Tree
from shoal.tasks.sources.rows import SUFFIXES, read_rows

ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("messages", "prompt", "completion", "tools")


@dataclass(frozen=True)
class Dialogue:
    where: str  # file and row, for error messages
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def read(source: str) -> Iterator[Dialogue]:
    """Yield every conversation of `source`. Raise UserError."""
    for path in find(source):
        for number, row in read_rows(path, COLUMNS):
            yield _conversation(f"{path}, row {number}", row)


def find(source: str) -> list[Path]:
    """Return the files that `source` names, downloading them from the hub if needed. Raise UserError."""
    if on_hub(source):
        return _from_hub(*source.split(":", 1))
    path = user_path(source)
    if not path.is_file():
        raise UserError(f"no file at {path.absolute()}; a hub data set is written as org/name:pattern")
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path} ends in none of {', '.join(SUFFIXES)}")
    return [path]


def on_hub(source: str) -> bool:
    return ":" in source or not (source.startswith((".", "/", "~")) or source.endswith(SUFFIXES))


def _from_hub(name: str, pattern: str = "") -> list[Path]:
    from huggingface_hub import HfApi

    try:
        repo_files = [] if pattern else call_hub(lambda: HfApi().list_repo_files(name, repo_type="dataset"))
        result = data_files(name, [pattern] if pattern else _training_files(name, repo_files))
    except HubError as error:
        raise UserError(
            f"data set {name!r} could not be fetched from the Hugging Face hub ({error}); for a local file "
            f"write a path that ends in {' or '.join(SUFFIXES)}"
        ) from error
    chosen = [path for path in result if path.name.endswith(SUFFIXES)]
    if not chosen:
        raise UserError(f"data set {name!r} has no {' or '.join(SUFFIXES)} file that matches {pattern!r}")
    return chosen


def _training_files(name: str, files: list[str]) -> list[str]:
    readable = [file for file in files if file.endswith(SUFFIXES)]
    chosen = [file for file in readable if "train" in PurePosixPath(file).name]
    if len({PurePosixPath(file).parent for file in chosen}) != 1:  # the repository has several data sets, or none
        raise UserError(
            f"data set {name!r}: choose the files to train on with {name}:PATTERN; it has {', '.join(readable[:12])}"
        )
    return chosen


def _conversation(where: str, row: dict[str, Any]) -> Dialogue:
    fields = {name: row[name] for name in COLUMNS if row.get(name) is not None}
    if "messages" in fields:
        messages = fields["messages"]
    elif isinstance(fields.get("prompt"), str) and isinstance(fields.get("completion"), str):
        messages = [
            {"role": "user", "content": fields["prompt"]},
            {"role": "assistant", "content": fields["completion"]},
        ]
    else:
        raise UserError(f"{where}: needs `messages`, a list, or `prompt` and `completion`, two strings")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: `messages` is not a list of messages")
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: `tools` is not a list")
    return Dialogue(where, [_message(f"{where}, message {i}", m) for i, m in enumerate(messages)], tools or None)


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where}: not an object with `role` and `content`")
    # Parquet stores absent fields as null.
    fields = {str(name): value for name, value in message.items() if value is not None}
    if fields.get("role") not in ROLES:
        raise UserError(f"{where}: `role` is {fields.get('role')!r}, not one of {', '.join(ROLES)}")
    calls = fields["role"] == "assistant" and bool(fields.get("tool_calls"))
    if not isinstance(fields.get("content"), str) and not (calls and "content" not in fields):
        raise UserError(f"{where}: `content` is not a string")
    return fields


# --- as tokens -----------------------------------------------------------------------------------------------------------

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Example:
    """A conversation's tokens up to the last trained one, and the trained spans [start, stop), in order."""

    tokens: array[int]
    spans: tuple[tuple[int, int], ...]

    @property
    def n_trained(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    @property
    def tree(self) -> Tree:
        """The first turn's prompt, with all later tokens as its only completion."""
        first = self.spans[0][0]
        return Tree(self.tokens[:first], [self.tokens[first:]])

    def trained_N(self) -> Tensor:
        """Return, for each token of the tree's completion, whether it is trained."""
        first = self.spans[0][0]
        trained = torch.zeros(len(self.tokens) - first, dtype=torch.bool)
        for start, stop in self.spans:
            trained[start - first : stop - first] = True
        return trained


class ChatTemplate:
    """A tokenizer's chat template. `ends` collects the tokens that end an assistant's turn."""

    def __init__(self, tokenizer: Any, eos: Collection[int]) -> None:
        """`eos` are the model's end-of-sequence tokens."""
        if not tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template; choose a model that has one (often named `-Instruct`)"
            )
        self.tokenizer = tokenizer
        self.eos = set(eos)
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ends: set[int] = set()

    def exceeds(self, conversation: Dialogue, max_tokens: int) -> bool:
        """Return whether the last turn's prompt is longer than `max_tokens`. This is a cheap check before `example`."""
        messages = conversation.messages
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        return last > 0 and len(self._tokens(conversation, messages[:last], prompt=True)) > max_tokens

    def example(self, conversation: Dialogue) -> Example:
        """Encode a conversation. Raise UserError, naming it, if the template does not determine the trained spans."""
        where, messages = conversation.where, conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError(f"{where}: it has no assistant message, so there is nothing to train on")
        if turns[0] == 0:
            raise UserError(f"{where}: it begins with an assistant message, so there is no prompt")
        messages = messages[: turns[-1] + 1]
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        if MARKED.search(template):
            tokens, spans = self._marked(conversation, messages)
        else:
            tokens, spans = self._derived(conversation, messages, turns)
        stops = [self._end(where, tokens, start, stop, last=stop == spans[-1][1]) for start, stop in spans]
        return Example(tokens[: stops[-1]], tuple((start, stop) for (start, _), stop in zip(spans, stops, strict=True)))

    def _derived(
        self, conversation: Dialogue, messages: list[dict[str, Any]], turns: list[int]
    ) -> tuple[array[int], list[tuple[int, int]]]:
        """Return the conversation's tokens and each turn's span, located by encoding the prefixes before and after it."""
        whole = self._tokens(conversation, messages)
        spans = []
        for turn in turns:
            before = self._tokens(conversation, messages[:turn], prompt=True)
            after = self._tokens(conversation, messages[: turn + 1])
            if whole[: len(before)] != before or whole[: len(after)] != after or len(after) <= len(before):
                raise UserError(
                    f"{conversation.where}: the chat template changes message {turn} or earlier ones when more messages"
                    " follow, so the assistant's tokens cannot be located; make one conversation for each assistant turn, or"
                    " mark the turns in the template with {% generation %}"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _marked(
        self, conversation: Dialogue, messages: list[dict[str, Any]]
    ) -> tuple[array[int], list[tuple[int, int]]]:
        encoded = self._encode(conversation, messages, return_assistant_tokens_mask=True)
        mask = [0, *encoded["assistant_masks"], 0]
        starts = [i for i in range(len(mask) - 1) if mask[i] < mask[i + 1]]
        stops = [i for i in range(len(mask) - 1) if mask[i] > mask[i + 1]]
        if not starts or starts[0] == 0:
            raise UserError(f"{conversation.where}: the chat template marks nothing as generated after a prompt")
        return array("i", encoded["input_ids"]), list(zip(starts, stops, strict=True))

    def _end(self, where: str, tokens: array[int], start: int, stop: int, *, last: bool) -> int:
        """Return where the trained span of the turn in tokens[start:stop] ends: after the token that ends the turn.

        Search the special tokens and white space after the turn's text. Prefer an EOS token to other special tokens. If
        there is neither, add EOS if this is the last turn, and raise UserError otherwise.
        """
        if tokens[stop - 1] not in self.eos | self.special and set(tokens[stop : stop + 1]) & (self.eos | self.special):
            stop += 1  # a template may mark the turn without its end token
        tail = stop
        while tail > start and self._follows_text(tokens[tail - 1]):
            tail -= 1
        for candidates in (self.eos, self.special):
            end = next((i for i in range(tail, stop) if tokens[i] in candidates), None)
            if end is not None:
                self.ends.add(tokens[end])
                return end + 1
        if not last or self.tokenizer.eos_token_id is None:
            raise UserError(
                f"{where}: the chat template writes no token that ends the assistant's turn, so the model could not learn to"
                " stop there; use conversations with one assistant message, or another template"
            )
        tokens[stop:] = array("i", [self.tokenizer.eos_token_id])
        return stop + 1

    def _follows_text(self, token: int) -> bool:
        return token in self.eos or token in self.special or not str(self.tokenizer.decode([token])).strip()

    def _tokens(self, conversation: Dialogue, messages: list[dict[str, Any]], *, prompt: bool = False) -> array[int]:
        return array("i", self._encode(conversation, messages, add_generation_prompt=prompt)["input_ids"])

    def _encode(self, conversation: Dialogue, messages: list[dict[str, Any]], **options: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=conversation.tools, return_dict=True, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"{conversation.where}: the chat template rejects this conversation ({error})") from error
