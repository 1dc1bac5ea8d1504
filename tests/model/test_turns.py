"""Turns: which tokens are the model's, and that only those are targets of a packed forward."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.logprobs import chosen_logprobs
from shoal.model.tree import Tree, forward_hidden, pack, split
from shoal.model.turns import fit, last_turn, model_positions, model_spans, model_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

lengths = st.lists(st.integers(1, 6), min_size=1, max_size=9).filter(lambda turns: len(turns) % 2 == 1)


@given(lengths)
def test_spans_are_the_models_turns(of_turns: list[int]) -> None:
    """Against tokens that say who wrote them."""
    written = [number for number, length in enumerate(of_turns) for _ in range(length)]
    turns, n = of_turns[:-1], len(written)
    assert fit(turns, n)
    assert [written[start:end] for start, end in model_spans(turns, n)] == [
        [number] * length for number, length in enumerate(of_turns) if number % 2 == 0
    ]
    assert [written[at] for at in model_positions(turns, n)] == [number for number in written if number % 2 == 0]
    assert model_tokens(turns, n) == len(model_positions(turns, n))
    assert set(last_turn(turns, written)) == {len(of_turns) - 1} and len(last_turn(turns, written)) == of_turns[-1]


CANNOT_BE = [[3], [3, 2, 1], [0, 3], [3, 0], [-1, 3], [3, -1], [5, 4], [6, 4], [2**31 - 1] * 2, [1, 1, 3, 4]]


def test_turns_that_cannot_be_do_not_fit_and_an_empty_list_is_a_single_turn() -> None:
    assert [turns for turns in CANNOT_BE if fit(turns, 9)] == []
    assert fit([], 0) and fit([], 7)
    assert model_spans([], 7) == [(0, 7)] and model_positions([], 0) == []


@given(st.lists(st.integers(-3, 12), max_size=8), st.integers(0, 30))
def test_turns_that_fit_leave_no_turn_empty_and_no_token_out(turns: list[int], n: int) -> None:
    if fit(turns, n) and n:
        spans = model_spans(turns, n)
        assert spans[0][0] == 0 and spans[-1][1] == n
        assert all(start < end for start, end in spans)
        assert all(before < after for (_, before), (after, _) in zip(spans, spans[1:], strict=False))


# ---- in a tree

PROMPT = [5, 6, 7]
COMPLETIONS = [[10, 11, 12, 13, 14, 15, 16], [20, 21, 22], [30, 31, 32, 33, 34]]
TURNS = [[2, 3], [], [1, 1, 1, 1]]
TREE = Tree(PROMPT, COMPLETIONS, TURNS)
OWN = [10, 11, 15, 16, 20, 21, 22, 30, 32, 34]


def test_only_the_models_tokens_are_targets_each_behind_the_token_before_it() -> None:
    packed = pack([TREE])
    assert packed.tokens_T.tolist() == [*PROMPT, *COMPLETIONS[0], *COMPLETIONS[1], *COMPLETIONS[2]]
    assert packed.target_N.tolist() == OWN
    assert packed.tokens_T[packed.predictor_N].tolist() == [7, 10, 14, 15, 7, 20, 21, 7, 31, 33]


@torch.no_grad()
def test_packed_logprobs_of_turns_equal_plain_forwards(tiny_model: Any) -> None:
    packed = pack([Tree([1, 2], [[3, 4]]), TREE])
    got_N, _ = chosen_logprobs(forward_hidden(tiny_model, packed), tiny_model.lm_head.weight, packed.target_N)
    expected = []
    for completion, turns in TREE.branches():
        logits_TV = tiny_model(torch.tensor([[*PROMPT, *completion]])).logits[0].float().log_softmax(-1)
        expected += [float(logits_TV[2 + at, completion[at]]) for at in model_positions(turns, len(completion))]
    torch.testing.assert_close(got_N[2:], torch.tensor(expected), atol=1e-4, rtol=0)


def test_a_split_tree_keeps_every_completions_turns() -> None:
    parts = split(TREE, 10)
    assert [part.completions for part in parts] == [[COMPLETIONS[0]], [COMPLETIONS[1]], [COMPLETIONS[2]]]
    assert torch.cat([pack([part]).target_N for part in parts]).tolist() == OWN
