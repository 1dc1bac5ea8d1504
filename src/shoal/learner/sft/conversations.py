"""Conversations for supervised fine-tuning: read from files, and encoded. Tokens that the assistant wrote are trained.

    examples/chat.jsonl, ./data/chat.parquet   a local file: its name ends in .jsonl, .jsonl.gz or .parquet
    org/name                                   the files of a hub data set whose names contain "train"
    org/name:data/train-*.parquet              those that match the pattern

A row holds `messages`, a list of {"role", "content"}, or `prompt` and `completion`: one user message and one assistant
message. An optional `tools` is passed to the chat template. Other columns are ignored.

An assistant's turn is trained from the first token after the generation prompt to the token that ends the turn. Both are
found by applying the model's chat template to prefixes of the conversation:

    up to the turn, with generation prompt    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    up to and including the turn              <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nYo<|im_end|>\\n
    trained                                                                                        Yo<|im_end|>

Invariant: every row is a conversation, or an error that names its file and row. The tokens before a trained token are those
that generation would see. If the tokens of one prefix are not a prefix of the next one's (the template rewrites earlier
turns, or tokens merge across the boundary), that is an error, unless the template itself marks what the assistant writes
({% generation %}).
Left out: images and sound; other field names ("from" and "value"); text without a chat template; weights of messages.
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

from shoal.errors import UserError
from shoal.model.sources import HubError, ask, data_files
from shoal.model.tree import Tree
from shoal.tasks.sources.rows import SUFFIXES, Rows

ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("messages", "prompt", "completion", "tools")


@dataclass(frozen=True)
class Dialogue:
    where: str  # file and row, for error messages
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def read(source: str) -> Iterator[Dialogue]:
    """Every conversation of `source` in order. Raise UserError."""
    for path in find(source):
        for number, row in Rows(path).read(COLUMNS):
            yield _conversation(f"{path}, row {number}", row)


def find(source: str) -> list[Path]:
    """The files that `source` names, downloaded if they are on the hub. Raise UserError."""
    if ":" in source or not (source.startswith((".", "/", "~")) or source.endswith(SUFFIXES)):
        return _from_hub(*source.split(":", 1))
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"no file at {path.absolute()}; a hub data set is written as org/name:pattern")
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path} ends in none of {', '.join(SUFFIXES)}")
    return [path]


def _from_hub(name: str, pattern: str = "") -> list[Path]:
    from huggingface_hub import HfApi

    try:
        listed = [] if pattern else ask(lambda: HfApi().list_repo_files(name, repo_type="dataset"))
        result = data_files(name, [pattern] if pattern else _training_files(name, listed))
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
    known = [file for file in files if file.endswith(SUFFIXES)]
    chosen = [file for file in known if "train" in PurePosixPath(file).name]
    if len({PurePosixPath(file).parent for file in chosen}) != 1:  # several sets in one repository, or none
        raise UserError(
            f"data set {name!r}: choose the files to train on with {name}:PATTERN; it has {', '.join(known[:12])}"
        )
    return chosen


def _conversation(where: str, row: dict[str, Any]) -> Dialogue:
    held = {name: row[name] for name in COLUMNS if row.get(name) is not None}
    if "messages" in held:
        messages = held["messages"]
    elif isinstance(held.get("prompt"), str) and isinstance(held.get("completion"), str):
        messages = [
            {"role": "user", "content": held["prompt"]},
            {"role": "assistant", "content": held["completion"]},
        ]
    else:
        raise UserError(f"{where}: needs `messages`, a list, or `prompt` and `completion`, two strings")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: `messages` is not a list of messages")
    tools = held.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: `tools` is not a list")
    return Dialogue(where, [_message(f"{where}, message {i}", m) for i, m in enumerate(messages)], tools or None)


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where}: it is not an object with `role` and `content`")
    held = {
        str(name): value for name, value in message.items() if value is not None
    }  # Parquet stores absent fields as null
    if held.get("role") not in ROLES:
        raise UserError(f"{where}: `role` is {held.get('role')!r}, not one of {', '.join(ROLES)}")
    calls = held["role"] == "assistant" and bool(held.get("tool_calls"))
    if not isinstance(held.get("content"), str) and not (calls and "content" not in held):
        raise UserError(f"{where}: `content` is not a string")
    return held


# --- as tokens -----------------------------------------------------------------------------------------------------------

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Example:
    """A conversation's tokens up to the last trained one, and the spans [start, stop) that are trained, in order."""

    tokens: array[int]
    spans: tuple[tuple[int, int], ...]

    @property
    def n_trained(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    @property
    def tree(self) -> Tree:
        """The first turn's prompt, with all that follows as its only completion."""
        first = self.spans[0][0]
        return Tree(self.tokens[:first], [self.tokens[first:]])

    def trained_N(self) -> Tensor:
        """bool, for each token of the tree's completion: whether it is trained."""
        first = self.spans[0][0]
        trained = torch.zeros(len(self.tokens) - first, dtype=torch.bool)
        for start, stop in self.spans:
            trained[start - first : stop - first] = True
        return trained


class ChatTemplate:
    """A tokenizer's chat template. `ends` are the tokens that ended an assistant's turn so far."""

    def __init__(self, tokenizer: Any, eos: Collection[int]) -> None:
        """`eos`: the tokens that the model declares as ends of a completion."""
        if not tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template; choose a model that has one (often named `-Instruct`)"
            )
        self.tokenizer = tokenizer
        self.eos = set(eos)
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ends: set[int] = set()

    def exceeds(self, conversation: Dialogue, most_tokens: int) -> bool:
        """Whether what precedes the last turn alone is longer. `example` encodes a conversation once for each turn."""
        messages = conversation.messages
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        return last > 0 and len(self._tokens(conversation, messages[:last], prompt=True)) > most_tokens

    def example(self, conversation: Dialogue) -> Example:
        """Raise UserError, naming the conversation, if the template does not determine the spans."""
        where, messages = conversation.where, conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError(f"{where}: it has no assistant message, so there is nothing to train on")
        if turns[0] == 0:
            raise UserError(f"{where}: it begins with an assistant message, so there is no prompt")
        until = messages[: turns[-1] + 1]
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        if MARKED.search(template):
            tokens, spans = self._marked(conversation, until)
        else:
            tokens, spans = self._derived(conversation, until, turns)
        ended = [self._end(where, tokens, start, stop, last=stop == spans[-1][1]) for start, stop in spans]
        return Example(tokens[: ended[-1]], tuple((start, stop) for (start, _), stop in zip(spans, ended, strict=True)))

    def _derived(
        self, conversation: Dialogue, until: list[dict[str, Any]], turns: list[int]
    ) -> tuple[array[int], list[tuple[int, int]]]:
        """The conversation's tokens, and each turn's span, between the ends of two prefixes."""
        whole = self._tokens(conversation, until)
        spans = []
        for turn in turns:
            before = self._tokens(conversation, until[:turn], prompt=True)
            after = self._tokens(conversation, until[: turn + 1])
            if whole[: len(before)] != before or whole[: len(after)] != after or len(after) <= len(before):
                raise UserError(
                    f"{conversation.where}: the chat template changes message {turn} or earlier ones when more messages"
                    " follow, so the assistant's tokens cannot be located; make one conversation for each assistant turn, or"
                    " mark the turns in the template with {% generation %}"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _marked(self, conversation: Dialogue, until: list[dict[str, Any]]) -> tuple[array[int], list[tuple[int, int]]]:
        encoded = self._encode(conversation, until, return_assistant_tokens_mask=True)
        mask = [0, *encoded["assistant_masks"], 0]
        starts = [i for i in range(len(mask) - 1) if mask[i] < mask[i + 1]]
        stops = [i for i in range(len(mask) - 1) if mask[i] > mask[i + 1]]
        if not starts or starts[0] == 0:
            raise UserError(f"{conversation.where}: the chat template marks nothing as generated after a prompt")
        return array("i", encoded["input_ids"]), list(zip(starts, stops, strict=True))

    def _end(self, where: str, tokens: array[int], start: int, stop: int, *, last: bool) -> int:
        """The end of the trained span of the turn in tokens[start:stop]: after the token that ends the turn.

        That token is searched in the special tokens and white space after the turn's text. A token that the model declares
        as an end is preferred over another special token. If the template writes neither, EOS is added after the last turn.
        """
        if tokens[stop - 1] not in self.eos | self.special and set(tokens[stop : stop + 1]) & (self.eos | self.special):
            stop += 1  # a template may not include the end in what it marks
        tail = stop
        while tail > start and self._follows_text(tokens[tail - 1]):
            tail -= 1
        for known in (self.eos, self.special):
            end = next((i for i in range(tail, stop) if tokens[i] in known), None)
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
            raise UserError(f"{conversation.where}: the chat template rejects it ({error})") from error
