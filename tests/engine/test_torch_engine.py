"""Completions of one or several turns equal those of a loop without a cache. Their logprobs equal a plain forward's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.protocol import Sampling
from shoal.engine.scheduler import close_gaps
from shoal.engine.torch_engine import TorchEngine
from shoal.model.sampling import choose
from shoal.model.turns import model_positions

from .support import PROMPTS, SEEDS, Groups, with_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = (1, 7, 20, 33)  # about one token in sixteen ends a turn
ENDLESS = Sampling(temperature=1.0, max_tokens=40, eos_ids=())
SOME_END = Sampling(temperature=1.0, max_tokens=40, eos_ids=ENDS)
LONG = Sampling(temperature=1.0, max_tokens=150, eos_ids=())  # the cache grows twice
TURNS = Sampling(temperature=1.0, max_tokens=60, eos_ids=(*ENDS, 41, 50))


def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
    """Reply with one to four tokens, which depend on all earlier ones and may be end tokens, at most three times."""
    assert tokens[-1] in TURNS.eos_ids
    reply = [1, 2 + group, 7, 30 + number][: 1 + (sum(tokens) + group) % 4]
    return reply if len(turns) < 6 and len(tokens) + len(reply) < TURNS.max_tokens else None


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> TorchEngine:
    engine = TorchEngine("float32")
    engine.load(tiny_folder)
    return engine


@pytest.fixture(scope="module")
def groups(engine: TorchEngine) -> Groups:
    return engine.generate(PROMPTS, SEEDS, SOME_END)


@pytest.fixture(scope="module")
def conversations(engine: TorchEngine) -> Groups:
    return engine.generate(PROMPTS, SEEDS, TURNS, respond)


def only_tokens(groups: Groups) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in groups]


@torch.no_grad()
def naive(model: Any, sequence: Sequence[int], seed: int, sampling: Sampling, start: int = 0) -> list[int]:
    """Generate one turn without a cache: one forward of the whole sequence per token, from position `start` on."""
    tokens: list[int] = []
    for position in range(start, sampling.max_tokens):
        logits_1V = model(torch.tensor([[*sequence, *tokens]])).logits[:, -1]
        tokens += choose(logits_1V, [seed], [position], sampling.temperature)[0].tolist()
        if tokens[-1] in sampling.eos_ids:
            break
    return tokens


def naive_turns(model: Any, group: int, number: int) -> tuple[list[int], list[int]]:
    """Return the tokens and turns of one conversation, by a loop over single turns."""
    tokens, turns = list[int](), list[int]()
    while True:
        start = len(tokens)
        tokens += naive(model, [*PROMPTS[group], *tokens], SEEDS[group][number], TURNS, start)
        reply = respond(group, number, tokens, turns) if tokens[-1] in TURNS.eos_ids else None
        if not reply:
            return tokens, turns
        turns += [len(tokens) - start, len(reply)]
        tokens += reply


@pytest.mark.parametrize(
    "sampling",
    [SOME_END, LONG, Sampling(temperature=0.6, max_tokens=20, eos_ids=ENDS)],
    ids=["some end early", "cache grows", "temperature 0.6"],
)
def test_every_completion_equals_a_naive_loop_with_its_seed(engine: TorchEngine, sampling: Sampling) -> None:
    expected = [
        [naive(engine.model, prompt, seed, sampling) for seed in group]
        for prompt, group in zip(PROMPTS[:3], SEEDS[:3], strict=True)
    ]
    assert only_tokens(engine.generate(PROMPTS[:3], SEEDS[:3], sampling)) == expected


def test_greedy_tokens_equal_transformers_own_generate_whatever_the_seed(engine: TorchEngine) -> None:
    completions = engine.generate(PROMPTS, [[0, 1]] * len(PROMPTS), Sampling(0.0, 30, ()))
    for group, prompt in zip(completions, map(torch.tensor, PROMPTS), strict=True):
        output = engine.model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=30,
            eos_token_id=None,
        )  # fmt: skip
        assert [completion.tokens for completion in group] == [output[0, len(prompt) :].tolist()] * 2


def test_a_completion_ends_at_its_first_end_token_or_the_limit(engine: TorchEngine, groups: Groups) -> None:
    assert len({len(c.tokens) for group in groups for c in group}) >= 5, (
        "the completions must have at least five different lengths"
    )
    for _, completion in with_prompts(groups):
        *body, last = completion.tokens
        assert not set(body) & set(ENDS)
        assert last in ENDS or len(completion.tokens) == SOME_END.max_tokens
    assert [len(group) for group in engine.generate(PROMPTS[:3], [[1, 2], [], [3]], ENDLESS)] == [2, 0, 1]
    for limit in (1, 2, 6):
        shorter = engine.generate(PROMPTS, SEEDS, Sampling(1.0, limit, ENDS))
        assert only_tokens(shorter) == [[tokens[:limit] for tokens in group] for group in only_tokens(groups)]


def test_turns_equal_a_loop_of_single_turns(engine: TorchEngine, conversations: Groups) -> None:
    assert {len(c.turns) for group in conversations for c in group} > {6}, (
        "some completions must have three replies and some fewer"
    )
    for g, group in enumerate(conversations):
        for number, completion in enumerate(group):
            assert (completion.tokens, completion.turns) == naive_turns(engine.model, g, number)


@torch.no_grad()
@pytest.mark.parametrize(
    ("temperature", "turns"), [(1.0, False), (0.5, False), (1.0, True)], ids=["plain", "cold", "several turns"]
)
def test_logprobs_and_rounded_hidden_states_of_sampled_tokens_equal_a_plain_forward(
    engine: TorchEngine, conversations: Groups, temperature: float, turns: bool
) -> None:
    groups = conversations if turns else engine.generate(PROMPTS, SEEDS, Sampling(temperature, 20, ENDS))
    for prompt, completion in with_prompts(groups):
        output = engine.model(torch.tensor([[*prompt, *completion.tokens]]), output_hidden_states=True)
        sampled_N = torch.tensor(model_positions(completion.turns, len(completion.tokens)))
        before_N = sampled_N + len(prompt) - 1
        logp_NV = torch.log_softmax(output.logits[0, before_N] / temperature, -1)
        logp_N = logp_NV.gather(-1, torch.tensor(completion.tokens)[sampled_N][:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), logp_N, atol=1e-4, rtol=0)
        assert completion.hidden_TH.dtype == torch.bfloat16 and len(completion.hidden_TH) == len(sampled_N)
        expected_TH = output.hidden_states[-1][0, before_N]
        torch.testing.assert_close(completion.hidden_TH.float(), expected_TH, atol=1e-4, rtol=2**-8)


def test_an_environment_that_never_replies_changes_nothing(engine: TorchEngine, groups: Groups) -> None:
    silent = engine.generate(PROMPTS, SEEDS, SOME_END, lambda *_: None)
    for (_, a), (_, b) in zip(with_prompts(silent), with_prompts(groups), strict=True):
        assert (a.tokens, a.logprobs, a.turns) == (b.tokens, b.logprobs, [])
        assert torch.equal(a.hidden_TH, b.hidden_TH)


def test_a_reply_that_leaves_room_for_one_token_is_used_and_a_longer_one_is_refused(engine: TorchEngine) -> None:
    groups = engine.generate(PROMPTS, SEEDS, TURNS, lambda g, n, tokens, turns: [4] * (59 - len(tokens)))
    with_reply = [c for group in groups for c in group if c.turns]
    assert with_reply and all(len(c.tokens) == 60 and sum(c.turns) == 59 for c in with_reply)
    with pytest.raises(ValueError, match="leave no room below max_tokens 60"):
        engine.generate(PROMPTS, SEEDS, TURNS, lambda g, n, tokens, turns: [4] * (60 - len(tokens)))


def test_the_error_for_generating_before_loading_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"call load\(\) first"):
        TorchEngine("float32").generate([[1]], [[1]], ENDLESS)


def test_loading_again_replaces_the_weights_of_the_same_model(tiny_folders: tuple[Path, Path], groups: Groups) -> None:
    engine, fresh = TorchEngine("float32"), TorchEngine("float32")
    engine.load(tiny_folders[0])
    before = engine.model
    engine.load(tiny_folders[1])
    fresh.load(tiny_folders[1])
    again, expected = (only_tokens(e.generate(PROMPTS, SEEDS, SOME_END)) for e in (engine, fresh))
    assert again == expected != only_tokens(groups)
    assert engine.model is before


rows_and_finished = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1))))


@given(rows_and_finished)
def test_closing_gaps_keeps_the_live_rows_and_moves_only_those_from_the_end_forward(case: tuple[int, set[int]]) -> None:
    """So if rows are copied in order, no copy overwrites a row that is still to be read."""
    n_rows, finished = case
    staying = [row for row in range(n_rows) if row not in finished]
    kept = close_gaps(n_rows, staying)
    assert sorted(kept) == staying
    assert all(old == new or (old >= len(kept) and new in finished) for new, old in enumerate(kept))
