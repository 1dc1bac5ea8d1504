from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine.batch import close_gaps
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine

from .support import naive, with_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

# Groups of different sizes, prompts of different lengths, no two seeds alike.
PROMPTS = [[5, 9, 33, 7], [12], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [3, 3, 8]]
SEEDS = [[101, 102, 103], [201], [301, 302], [401, 402, 403, 404]]
ENDLESS = Sampling(temperature=1.0, max_tokens=40, eos_ids=())
SOME_END = Sampling(temperature=1.0, max_tokens=40, eos_ids=(1, 7, 20, 33))  # about one token in sixteen ends a row
LONG = Sampling(temperature=1.0, max_tokens=150, eos_ids=())  # longer than two growths of the cache


@pytest.fixture(scope="module")
def groups(engine: TorchEngine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, SEEDS, SOME_END)


def only_tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in groups]


def flat(groups: list[list[Completion]]) -> list[tuple[list[int], Completion]]:
    return with_prompts(PROMPTS, groups)


# ---- tokens


@pytest.mark.parametrize(
    "sampling",
    [SOME_END, LONG, Sampling(temperature=0.6, max_tokens=20, eos_ids=(1, 7, 20, 33))],
    ids=["some end early", "cache grows", "temperature 0.6"],
)
def test_every_completion_equals_a_naive_loop_with_its_seed(engine: TorchEngine, sampling: Sampling) -> None:
    expected = [
        [naive(engine.model, prompt, seed, sampling) for seed in group]
        for prompt, group in zip(PROMPTS[:3], SEEDS[:3], strict=True)
    ]
    assert only_tokens(engine.generate(PROMPTS[:3], SEEDS[:3], sampling)) == expected


def test_greedy_tokens_equal_transformers_own_generate_whatever_the_seed(engine: TorchEngine) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=30, eos_ids=())
    got = engine.generate(PROMPTS, [[0, 1]] * len(PROMPTS), sampling)
    for group, prompt in zip(got, map(torch.tensor, PROMPTS), strict=True):
        output = engine.model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=30,
            eos_token_id=None,
        )  # fmt: skip
        assert [one.tokens for one in group] == [output[0, len(prompt) :].tolist()] * 2


# ---- lengths


def test_a_completion_ends_at_its_first_end_token_or_the_limit(
    engine: TorchEngine, groups: list[list[Completion]]
) -> None:
    assert len({len(c.tokens) for _, c in flat(groups)}) >= 5, "rows end at many different times"
    for _, completion in flat(groups):
        *body, last = completion.tokens
        assert not set(body) & set(SOME_END.eos_ids)
        assert last in SOME_END.eos_ids or len(completion.tokens) == SOME_END.max_tokens
    assert [len(group) for group in engine.generate(PROMPTS[:3], [[1, 2], [], [3]], ENDLESS)] == [2, 0, 1]
    for most in (1, 2, 6):
        shorter = engine.generate(PROMPTS, SEEDS, Sampling(1.0, most, eos_ids=SOME_END.eos_ids))
        assert only_tokens(shorter) == [[tokens[:most] for tokens in group] for group in only_tokens(groups)]


# ---- logprobs and hidden states


def plain(model: Any, prompt: Sequence[int], completion: Completion, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logprobs_T and the final hidden states_TH at the predicting positions, from one plain forward."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *completion.tokens]])
        output = model(ids, output_hidden_states=True)
    span = slice(len(prompt) - 1, -1)
    logp_TV = torch.log_softmax(output.logits[0, span] / temperature, -1)
    return logp_TV.gather(-1, ids[0, len(prompt) :, None])[:, 0], output.hidden_states[-1][0, span]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_at_the_temperature_and_rounded_hidden_states_equal_a_plain_forward(
    engine: TorchEngine, temperature: float
) -> None:
    for prompt, completion in flat(engine.generate(PROMPTS, SEEDS, Sampling(temperature, 20, SOME_END.eos_ids))):
        expected_T, expected_TH = plain(engine.model, prompt, completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected_T, atol=1e-4, rtol=0)
        assert completion.hidden_TH.dtype == torch.bfloat16
        torch.testing.assert_close(completion.hidden_TH.float(), expected_TH, atol=1e-4, rtol=2**-8)


# ---- weights


def test_generating_before_loading_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"call load\(\) first"):
        TorchEngine("float32").generate([[1]], [[1]], ENDLESS)


def test_loading_again_swaps_the_weights_in_the_same_model(tiny_folders: tuple[Path, Path], groups: Any) -> None:
    engine, fresh = TorchEngine("float32"), TorchEngine("float32")
    engine.load(tiny_folders[0])
    before = engine.model
    engine.load(tiny_folders[1])
    fresh.load(tiny_folders[1])
    again, expected = (only_tokens(e.generate(PROMPTS, SEEDS, SOME_END)) for e in (engine, fresh))
    assert again == expected != only_tokens(groups)
    assert engine.model is before


# ---- closing gaps

rows_and_finished = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1))))


@given(rows_and_finished)
def test_closing_gaps_keeps_the_live_rows_and_moves_only_those_from_the_end_forward(case: tuple[int, set[int]]) -> None:
    """So that copying in order never overwrites a row that is still to be read."""
    n_rows, finished = case
    staying = [row for row in range(n_rows) if row not in finished]
    keep = close_gaps(n_rows, staying)
    assert sorted(keep) == staying
    assert all(old == new or (old >= len(keep) and new in finished) for new, old in enumerate(keep))
