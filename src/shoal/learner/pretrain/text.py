"""Streams text for pretraining: reads numbered documents, tokenises and concatenates them, and cuts out sequences.

    data/c4-train.*.json.gz    JSON Lines with a field "text", as in C4 (or .json, .jsonl, .jsonl.gz)
    data/part-*.parquet        a column "text"
    notes.txt                  split at line ends into pieces of about 16 KiB
    allenai/c4:en/c4-train.0000*.json.gz    files of a Hugging Face data set, downloaded before reading starts

Files are read in the order of their names, as streams. A document ends with the tokenizer's EOS token. A sequence may
hold parts of several documents, which attend to each other. Documents are grouped into shares of SHARE documents. Share
numbers continue from one epoch to the next. `take` returns the next share for this site.
Invariant: the same files give the same documents with the same numbers. A `TextPlace` identifies the next token: a
stream moved there continues with the same tokens. Within an epoch no two shares have a document in common.
Left out: shuffling, and masks between documents.
"""

import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError, user_path
from shoal.model.sources import HubError, data_files
from shoal.tasks.sources.rows import read_rows

PIECE_BYTES = 16 << 10
SHARE = 256  # documents in a share; one site reads a whole share
HEAD_BYTES = 64 << 10  # the fingerprint covers this many bytes at the start of each file
JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
HUB = re.compile(r"([\w.-]+/[\w.-]+):(.+)")  # ORGANISATION/NAME:PATTERN
SUFFIXES = (*JSON, ".parquet", ".txt")


class EndError(Exception):
    """A document number is past the last document. `count` is the number of documents."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} documents")
        self.count = count


def find(source: str) -> list[Path]:
    """Return the files that a path, a pattern or a hub data set names, sorted by name. Raise UserError."""
    if not (hub := HUB.fullmatch(source)):
        return sorted(Path(name) for name in glob.glob(str(user_path(source)), recursive=True))  # noqa: PTH207 - a pattern may be absolute
    try:
        return data_files(hub[1], [hub[2]])
    except HubError as error:
        raise UserError(
            f"data set {hub[1]} could not be fetched from the Hugging Face hub ({error}); without a connection, download "
            f"it elsewhere (hf download {hub[1]} --repo-type dataset --local-dir FOLDER) and set pretrain.data to "
            f"FOLDER/{hub[2]}"
        ) from error


@dataclass(frozen=True)
class Document:
    text: str
    ends: bool  # false if more pieces of the same file follow


class Corpus:
    def __init__(self, source: str, field: str = "text") -> None:
        """Raise UserError if `source` matches no text file."""
        if not source:
            raise UserError(f"pretrain.data is empty: set it to files that end in {', '.join(SUFFIXES)}")
        self.files = find(source)
        if not self.files:
            raise UserError(
                f"no file matches {source!r}; write a path or a pattern such as data/*.jsonl, or ORGANISATION/NAME:PATTERN "
                "for a data set on the Hugging Face hub"
            )
        for path in self.files:
            if not path.name.endswith(SUFFIXES):
                raise UserError(f"{path}: its name ends in none of {', '.join(SUFFIXES)}")
        self.field = field
        self._items, self._next = self._read(), 0

    def document(self, number: int) -> Document:
        """Return document `number`, from 0. Raise EndError after the last document, UserError for a faulty one."""
        if number < self._next:
            self._items, self._next = self._read(), 0
        skipped = number - self._next
        item = next(islice(self._items, skipped, None), None)
        if item is None:
            self._items, self._next = self._read(), 0
            raise EndError(sum(1 for _ in self._read()))
        self._next = number + 1
        return item

    def fingerprint(self) -> str:
        """Hash the files' sizes and first bytes. Sites with the same data get the same hash."""
        result = sha256(self.field.encode())
        for path in self.files:
            with path.open("rb") as file:
                result.update(f"{path.stat().st_size}\n".encode() + sha256(file.read(HEAD_BYTES)).digest())
        return result.hexdigest()

    def _read(self) -> Iterator[Document]:
        for path in self.files:
            yield from _pieces(path) if path.suffix == ".txt" else self._rows(path)

    def _rows(self, path: Path) -> Iterator[Document]:
        for number, row in read_rows(path, [self.field]):
            text = row.get(self.field)
            if not isinstance(text, str):
                raise UserError(f"{path}, row {number}: no text in {self.field!r}; see pretrain.field")
            yield Document(text, ends=True)


def _pieces(path: Path) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = file.readlines(PIECE_BYTES)
            while lines:
                following = file.readlines(PIECE_BYTES)
                yield Document("".join(lines), ends=not following)
                lines = following
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


# --- as tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextPlace:
    """The position of the next token: share, document in the share, token in the document."""

    share: int
    document: int = 0
    token: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class TokenStream:
    def __init__(
        self, corpus: Corpus, tokenizer: Any, *, first: int, share: int = SHARE, take: Callable[[], int] | None = None
    ) -> None:
        """`first` is the number of the first document to train on, and `share` the number of documents per share.

        Without `take`, read every share.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end token, which separates documents; set eos_token in its config")
        self.corpus, self.tokenizer, self.take = corpus, tokenizer, take or self._following
        self.first, self.share = first, share
        self.place: TextPlace | None = None  # None until the first share is taken
        self.shares: int | None = None  # number of shares per epoch; None until the end of an epoch is reached
        self._tokens: list[int] | None = None  # tokens of the document at `place`

    def sequences(self, count: int, length: int) -> Tensor:
        """Return the next tokens as a tensor of shape (count, length)."""
        result: list[int] = []
        while len(result) < count * length:
            result += self._read(count * length - len(result))
        return torch.tensor(result).view(count, length)

    def move(self, place: TextPlace | None) -> None:
        """Continue from `place`."""
        self.place, self._tokens = place, None

    def _read(self, max_tokens: int) -> list[int]:
        """Return tokens of the current document, and advance past them."""
        place = self.place or TextPlace(self.take())
        if self._tokens is None:
            tokens = self._document(place)
            if tokens is None:
                self.move(TextPlace(self.take()))
                return []
            self._tokens = tokens
        result = self._tokens[place.token : place.token + max_tokens]
        self.place = replace(place, token=place.token + len(result))
        if self.place.token == len(self._tokens):
            last = place.document + 1 == self.share
            self.move(TextPlace(self.take()) if last else TextPlace(place.share, place.document + 1))
        return result

    def _document(self, place: TextPlace) -> list[int] | None:
        """Return the document's tokens, or None after the last document of an epoch."""
        try:
            document = self.corpus.document(self._number(place))
        except EndError as end:
            if self.shares is None:
                self.shares = -(-max(0, end.count - self.first) // self.share)
                if not self.shares:
                    raise UserError(
                        f"pretrain.heldout = {self.first} holds out all {end.count} documents: none is left to train on"
                    ) from end
                return self._document(place) if place.share >= self.shares else None
            return None
        return encoded(self.tokenizer, document.text, ends=document.ends)

    def _following(self) -> int:
        return self.place.share + 1 if self.place else 0

    def _number(self, place: TextPlace) -> int:
        share = place.share if self.shares is None else place.share % self.shares
        return self.first + share * self.share + place.document


def encoded(tokenizer: Any, text: str, *, ends: bool) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*tokens, tokenizer.eos_token_id] if ends else tokens


def heldout(corpus: Corpus, tokenizer: Any, count: int, length: int) -> Tensor:
    """Return the first `count` documents as a tensor of shape (sequences, length), without an incomplete sequence."""
    tokens: list[int] = []
    for number in range(count):
        try:
            document = corpus.document(number)
        except EndError as end:
            raise UserError(f"pretrain.heldout = {count}, but there are only {end.count} documents: lower it") from end
        tokens += encoded(tokenizer, document.text, ends=document.ends)
    whole = len(tokens) // length
    if count and not whole:
        raise UserError(
            f"the {count} held-out documents have {len(tokens)} tokens, fewer than one sequence of {length}: "
            "raise pretrain.heldout"
        )
    return torch.tensor(tokens[: whole * length], dtype=torch.int64).view(whole, length)
