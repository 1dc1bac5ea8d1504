"""Turns of a completion: which tokens the model wrote, and which an environment.

    tokens   m m m e e m m m m        turns = [3, 2]: the lengths of all turns but the last, which has the rest

Turns alternate. The first and the last are the model's, so there is an even number of lengths; [] is a single turn.
Only the model's tokens have logprobs, hidden states, proofs and a loss.
Invariant: all functions but `fit` require turns that `fit` accepts. `store/rollouts` checks the turns in rollout files.
Nothing here imports torch. Left out: what the environment writes (`tasks/environments`).
"""

from collections.abc import Sequence

Turns = Sequence[int]


def fit(turns: Turns, n_tokens: int) -> bool:
    """Return whether a completion of `n_tokens` can have these turns: none is empty, the last one included."""
    return not turns or (len(turns) % 2 == 0 and min(turns) >= 1 and sum(turns) < n_tokens)


def model_spans(turns: Turns, n_tokens: int) -> list[tuple[int, int]]:
    """Return start and end of each turn of the model.

    >>> model_spans([3, 2], 9)
    [(0, 3), (5, 9)]
    """
    ends = [0]
    for length in turns:
        ends.append(ends[-1] + length)
    ends.append(n_tokens)
    return list(zip(ends[::2], ends[1::2], strict=True))


def model_positions(turns: Turns, n_tokens: int) -> list[int]:
    """Return the positions of the model's tokens within the completion."""
    return [position for start, end in model_spans(turns, n_tokens) for position in range(start, end)]


def model_tokens(turns: Turns, n_tokens: int) -> int:
    """Return how many of the tokens the model wrote."""
    return n_tokens - sum(turns[1::2])


def last_turn(turns: Turns, tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens of the last turn."""
    return tokens[sum(turns) :]
