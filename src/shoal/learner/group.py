"""A group to train on, and its outline: what ranks know of it that do not compute it.

The leading rank has the tokens. The others get outlines, which tell lengths and rewards in place of tokens: enough to plan
the rows and to divide the sums. Tokens go only to the rank that computes them (`deal`).
Invariant: equal groups are equal to the last bit. Made by `groups` and `incoming`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shoal.model.turns import model_tokens

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outline:
    """A group as every rank knows it: without its tokens and logprobs."""

    submission: str
    number: int  # in the submission
    policy_version: int
    prompt_tokens: int
    lengths: list[int]  # tokens of each completion
    rewards: list[float]
    turns: list[list[int]] = field(default_factory=list)  # of each completion, see `model/turns`; []: all are single
    checked: bool = True  # false: the behaviour logprobs are the worker's own, and are not used

    @cached_property
    def trained(self) -> list[int]:
        """How many tokens of each completion are trained on: those that the model wrote."""
        turns = self.turns or [[]] * len(self.lengths)
        return [model_tokens(of, length) for of, length in zip(turns, self.lengths, strict=True)]

    @property
    def n_tokens(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, eq=False)
class Group:
    """G completions of one prompt, with what training needs of them. Tokens and logprobs are arrays, or lists."""

    submission: str
    policy_version: int
    prompt: Array | Sequence[int]  # int32 (P,)
    completions: Sequence[Array | Sequence[int]]  # int32, of each completion
    behaviour: Sequence[Array | Sequence[float]]  # float32: of trained tokens under the sampling version, from the file
    rewards: list[float]
    turns: list[list[int]] = field(default_factory=list)
    checked: bool = True
    number: int = 0

    @cached_property
    def outline(self) -> Outline:
        return Outline(
            self.submission,
            self.number,
            self.policy_version,
            len(self.prompt),
            [len(tokens) for tokens in self.completions],
            self.rewards,
            self.turns,
            self.checked,
        )

    @property
    def trained(self) -> list[int]:
        return self.outline.trained

    @property
    def n_tokens(self) -> int:
        return self.outline.n_tokens

    def __eq__(self, other: object) -> bool:
        """Equal to the last bit."""
        return isinstance(other, Group) and self.outline == other.outline and self._values() == other._values()

    def _values(self) -> list[bytes]:
        tokens = [np.asarray(of, np.int32).tobytes() for of in (self.prompt, *self.completions)]
        return tokens + [np.asarray(of, np.float32).tobytes() for of in self.behaviour]


Known = Group | Outline  # the leading rank has the groups, the others their outlines


def outline_of(group: Known) -> Outline:
    return group.outline if isinstance(group, Group) else group


def encode(groups: Sequence[Group], *, after: int = 0, full: bool = True) -> bytes:
    """Their outlines as JSON, which keeps floats exactly. They come after the first `after` that the other ranks have."""
    outlines = [asdict(group.outline) for group in groups]
    return json.dumps({"after": after, "full": full, "groups": outlines}).encode()


def decode(data: bytes, known: Sequence[Outline] = ()) -> tuple[list[Outline], bool]:
    """The step's outlines of `encode`'s message, and whether its batch is full."""
    message = json.loads(data)
    return [*known[: message["after"]], *(Outline(**fields) for fields in message["groups"])], message["full"]
