"""Tokens as they are trained: documents, tokenised one at a time and laid end to end, cut into sequences.

A document ends with the tokenizer's end token, and a sequence may hold parts of several documents, which see each other,
as in the papers. Documents come in shares of `pretrain.share` documents; shares are numbered on through the epochs, and
whoever gives numbers out (`take`) decides which site reads which. A site goes on with its next share where its last ended.
Invariant: the place says exactly which token is next. A stream that is opened there gives the tokens that the old one
would have given, and within an epoch no two shares have a document in common.
Called by the trainer. Left out: shuffling, masking between documents.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.learner.pretrain.text import Corpus, EndError, TextError


@dataclass(frozen=True)
class Place:
    """The next token: in this share, document of it, and token of that."""

    share: int
    document: int = 0
    token: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class Stream:
    def __init__(
        self, corpus: Corpus, tokenizer: Any, *, first: int, share: int, take: Callable[[], int] | None = None
    ) -> None:
        """`first`: the first document to train on. `share`: documents in a share. Without `take` all shares are ours."""
        if tokenizer.eos_token_id is None:
            raise TextError("the tokenizer has no end token, which separates documents; set eos_token in its config")
        self.corpus, self.tokenizer, self.take = corpus, tokenizer, take or self._following
        self.first, self.share = first, share
        self.place: Place | None = None  # None: at the start of a share that is not taken yet
        self.shares: int | None = None  # in an epoch; known once the end was met
        self._tokens: list[int] | None = None  # of the document at the place

    def sequences(self, count: int, length: int) -> Tensor:
        """The next tokens, (count, length)."""
        found: list[int] = []
        while len(found) < count * length:
            found += self._some(count * length - len(found))
        return torch.tensor(found).view(count, length)

    def move(self, place: Place | None) -> None:
        """Go on elsewhere."""
        self.place, self._tokens = place, None

    def epoch(self) -> int:
        return self.place.share // self.shares if self.place and self.shares else 0

    def _some(self, most: int) -> list[int]:
        """Tokens from the document at the place, and the place after them."""
        place = self.place or Place(self.take())
        if self._tokens is None:
            tokens = self._document(place)
            if tokens is None:
                self.move(Place(self.take()))
                return []
            self._tokens = tokens
        found = self._tokens[place.token : place.token + most]
        self.place = replace(place, token=place.token + len(found))
        if self.place.token == len(self._tokens):
            last = place.document + 1 == self.share
            self.move(Place(self.take()) if last else Place(place.share, place.document + 1))
        return found

    def _document(self, place: Place) -> list[int] | None:
        """Its tokens; None behind the last document of an epoch."""
        try:
            document = self.corpus.document(self._number(place))
        except EndError as end:
            if self.shares is None:
                self.shares = -(-max(0, end.count - self.first) // self.share)
                if not self.shares:
                    raise TextError(
                        f"{end.count} documents, of which pretrain.heldout = {self.first} are held out: "
                        "none is left to train on"
                    ) from end
                return self._document(place) if place.share >= self.shares else None
            return None
        return encoded(self.tokenizer, document.text, ends=document.ends)

    def _following(self) -> int:
        return self.place.share + 1 if self.place else 0

    def _number(self, place: Place) -> int:
        share = place.share if self.shares is None else place.share % self.shares
        return self.first + share * self.share + place.document


def encoded(tokenizer: Any, text: str, *, ends: bool) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*tokens, tokenizer.eos_token_id] if ends else tokens


def heldout(corpus: Corpus, tokenizer: Any, count: int, length: int) -> Tensor:
    """The first `count` documents as whole sequences, (sequences, length); what is left over is dropped."""
    tokens: list[int] = []
    for number in range(count):
        try:
            document = corpus.document(number)
        except EndError as end:
            raise TextError(f"pretrain.heldout = {count}, and there are {end.count} documents: lower it") from end
        tokens += encoded(tokenizer, document.text, ends=document.ends)
    whole = len(tokens) // length
    if count and not whole:
        raise TextError(
            f"the {count} held-out documents have {len(tokens)} tokens, fewer than one sequence of {length}: "
            "raise pretrain.heldout"
        )
    return torch.tensor(tokens[: whole * length], dtype=torch.int64).view(whole, length)
