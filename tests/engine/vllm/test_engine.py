"""vLLM draws Shoal's tokens from Shoal's seeds, and says what they were drawn from. Slow; needs vLLM."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.model.load import load_model
from shoal.model.sampling import replay_margins
from shoal.model.sources import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

SAMPLING = Sampling(1.0, 24, (1,))
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
SEEDS = [[100 * group + number for number in range(4)] for group in range(len(PROMPTS))]
NEAR = 1e-2  # nats between two engines in float32


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve("bundled:tiny")


@pytest.fixture(scope="module")
def engine(vllm_python: str, tiny: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine("float32", 1, vllm_python)
    engine.load(tiny)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny)


@pytest.fixture(scope="module")
def made(engine: VllmEngine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, SEEDS, SAMPLING)


@torch.inference_mode()
def computed(model: Any, prompt: Sequence[int], completion: Completion) -> tuple[torch.Tensor, torch.Tensor]:
    """What plain torch draws the completion's tokens from: hidden_TH and logits_TV."""
    start, sequence = len(prompt) - 1, [*prompt, *completion.tokens]
    output = model(torch.tensor([sequence]), output_hidden_states=True)
    return output.hidden_states[-1][0, start:-1], output.logits[0, start:-1]


def test_every_token_is_the_one_that_its_seed_yields(model: Any, made: list[list[Completion]]) -> None:
    for prompt, seeds, group in zip(PROMPTS, SEEDS, made, strict=True):
        for seed, one in zip(seeds, group, strict=True):
            _, logits_TV = computed(model, prompt, one)
            positions = range(len(one.tokens))
            margins_T = replay_margins(logits_TV, torch.tensor(one.tokens), [seed] * len(positions), positions)
            assert float(margins_T.max()) < NEAR
    assert len({tuple(one.tokens) for group in made for one in group}) > len(PROMPTS), "seeds differ"


def test_hidden_states_and_logprobs_are_those_of_the_tokens(model: Any, made: list[list[Completion]]) -> None:
    for prompt, group in zip(PROMPTS, made, strict=True):
        for one in group:
            hidden_TH, logits_TV = computed(model, prompt, one)
            logp_T = logits_TV.log_softmax(-1)[torch.arange(len(one.tokens)), one.tokens]
            torch.testing.assert_close(torch.tensor(one.logprobs), logp_T, atol=NEAR, rtol=0)
            torch.testing.assert_close(one.hidden_TH.float(), hidden_TH, atol=NEAR, rtol=0.02)
            assert one.hidden_TH.dtype == torch.bfloat16


def test_a_completion_ends_with_an_end_token_or_at_the_limit(made: list[list[Completion]]) -> None:
    for one in [one for group in made for one in group]:
        assert 1 not in one.tokens[:-1]
        assert one.tokens[-1] == 1 or len(one.tokens) == SAMPLING.max_tokens


def test_more_requests_than_fit_wait_their_turn(engine: VllmEngine) -> None:
    short = Sampling(1.0, 3, (1,))
    seeds = [list(range(300))]
    together = engine.generate(PROMPTS[:1], seeds, short)[0]
    alone = engine.generate(PROMPTS[:1], [seeds[0][290:292]], short)[0]
    assert [one.tokens for one in together[290:292]] == [one.tokens for one in alone]


def test_greedy_tokens_are_the_torch_engines(engine: VllmEngine, tiny: Path) -> None:
    greedy = Sampling(0.0, 12, (1,))
    torch_engine = TorchEngine("float32")
    torch_engine.load(tiny)
    seeds = [[0]] * len(PROMPTS)
    ours, theirs = (each.generate(PROMPTS, seeds, greedy) for each in (torch_engine, engine))
    assert [one.tokens for [one] in ours] == [one.tokens for [one] in theirs]


def test_a_turn_goes_on_after_an_environments_answer(engine: VllmEngine, model: Any) -> None:
    ends = Sampling(1.0, 24, tuple(range(20)))  # many end tokens

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return [30, 31] if not turns and len(tokens) < 20 else None

    [group] = engine.generate(PROMPTS[:1], SEEDS[:1], ends, respond)
    assert any(one.turns for one in group)
    for seed, one in zip(SEEDS[0], group, strict=True):
        if not one.turns:
            continue
        first, given = one.turns
        assert one.tokens[first : first + given] == [30, 31]
        own = [*range(first), *range(first + given, len(one.tokens))]
        assert len(one.logprobs) == len(one.hidden_TH) == len(own)
        _, logits_TV = computed(model, PROMPTS[0], one)
        tokens_N = torch.tensor([one.tokens[at] for at in own])
        margins_N = replay_margins(logits_TV[own], tokens_N, [seed] * len(own), own)
        assert float(margins_N.max()) < NEAR, "positions count given tokens"


def test_a_long_prompt_is_shared_and_its_tokens_are_right(engine: VllmEngine, model: Any, tiny: Path) -> None:
    prompt = [5 + at * at % 40 for at in range(300)]  # more than two blocks of vLLM's cache
    for seeds in ([1, 2, 3, 4], [5, 6]):  # the second time it is cached
        [group] = engine.generate([prompt], [seeds], SAMPLING)
        for seed, one in zip(seeds, group, strict=True):
            hidden_TH, logits_TV = computed(model, prompt, one)
            positions = range(len(one.tokens))
            margins_T = replay_margins(logits_TV, torch.tensor(one.tokens), [seed] * len(positions), positions)
            assert float(margins_T.max()) < NEAR
            torch.testing.assert_close(one.hidden_TH.float(), hidden_TH, atol=NEAR, rtol=0.02)
