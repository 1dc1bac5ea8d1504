"""Conversations from files: JSON lines or Parquet, on this machine or in a data set of the Hugging Face hub.

    examples/chat.jsonl, ./data/chat.parquet   a local file: its name ends in .jsonl or .parquet
    org/name                                   the files of a hub data set whose names contain "train"
    org/name:data/train-*.parquet              those that match the pattern

A row holds `messages`, a list of {"role", "content"}, or `prompt` and `completion`: one user message and one assistant
message. An optional `tools` is passed to the chat template. Other columns are ignored.
Invariant: every row is a conversation, or an error that names its file and line.
Called by `shoal sft`. Left out: images and sound, and other field names ("from" and "value").
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.errors import UserError
from shoal.model.sources import HubError, ask, data_files

SUFFIXES = (".jsonl", ".parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("messages", "prompt", "completion", "tools")


class ConversationError(UserError):
    """Data that cannot be trained on. The message names the file and line, or the data set."""


@dataclass(frozen=True)
class Conversation:
    where: str  # file and line, for error messages
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def read(source: str) -> Iterator[Conversation]:
    """Every conversation of `source` in order. Raises ConversationError."""
    for path in find(source):
        rows = _json_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
        for where, row in rows:
            yield _conversation(where, row)


def find(source: str) -> list[Path]:
    """The files that `source` names, downloaded if they are on the hub. Raises ConversationError."""
    if ":" in source or not (source.startswith((".", "/", "~")) or source.endswith(SUFFIXES)):
        return _from_hub(*source.split(":", 1))
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConversationError(f"no file at {path.absolute()}; a hub data set is written as org/name:pattern")
    if path.suffix not in SUFFIXES:
        raise ConversationError(f"{path} is neither .jsonl nor .parquet")
    return [path]


def _from_hub(name: str, pattern: str = "") -> list[Path]:
    from huggingface_hub import HfApi

    try:
        listed = [] if pattern else ask(lambda: HfApi().list_repo_files(name, repo_type="dataset"))
        found = data_files(name, [pattern] if pattern else _training_files(name, listed))
    except HubError as error:
        raise ConversationError(
            f"data set {name!r} could not be fetched from the Hugging Face hub ({error}); for a local file "
            f"write a path that ends in {' or '.join(SUFFIXES)}"
        ) from error
    chosen = [path for path in found if path.suffix in SUFFIXES]
    if not chosen:
        raise ConversationError(f"data set {name!r} has no {' or '.join(SUFFIXES)} file that matches {pattern!r}")
    return chosen


def _training_files(name: str, files: list[str]) -> list[str]:
    known = [file for file in files if file.endswith(SUFFIXES)]
    chosen = [file for file in known if "train" in PurePosixPath(file).name]
    if len({PurePosixPath(file).parent for file in chosen}) != 1:  # several sets in one repository, or none
        raise ConversationError(
            f"data set {name!r}: choose the files to train on with {name}:PATTERN; it has {', '.join(known[:12])}"
        )
    return chosen


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
                    raise ConversationError(f"{where}: not JSON ({error})") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            if not columns:
                raise ConversationError(f"{path}: it has no column {' or '.join(COLUMNS[:3])}")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except pyarrow.ArrowException as error:
        raise ConversationError(f"{path}: not a readable Parquet file ({error})") from error


def _conversation(where: str, row: Any) -> Conversation:
    held = {name: row[name] for name in COLUMNS if row.get(name) is not None} if isinstance(row, dict) else {}
    if "messages" in held:
        messages = held["messages"]
    elif isinstance(held.get("prompt"), str) and isinstance(held.get("completion"), str):
        messages = [
            {"role": "user", "content": held["prompt"]},
            {"role": "assistant", "content": held["completion"]},
        ]
    else:
        raise ConversationError(f"{where}: needs `messages`, a list, or `prompt` and `completion`, two strings")
    if not isinstance(messages, list) or not messages:
        raise ConversationError(f"{where}: `messages` is not a list of messages")
    tools = held.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ConversationError(f"{where}: `tools` is not a list")
    return Conversation(where, [_message(f"{where}, message {i}", m) for i, m in enumerate(messages)], tools or None)


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ConversationError(f"{where}: it is not an object with `role` and `content`")
    held = {
        str(name): value for name, value in message.items() if value is not None
    }  # Parquet stores absent fields as null
    if held.get("role") not in ROLES:
        raise ConversationError(f"{where}: `role` is {held.get('role')!r}, not one of {', '.join(ROLES)}")
    calls = held["role"] == "assistant" and bool(held.get("tool_calls"))
    if not isinstance(held.get("content"), str) and not (calls and "content" not in held):
        raise ConversationError(f"{where}: `content` is not a string")
    return held
