"""vLLM samples the tokens that Shoal's seeds determine, with the right logprobs and hidden states.

These tests are slow and need vLLM.
"""

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
from shoal.model.turns import model_positions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

SAMPLING = Sampling(1.0, 24, (1,))
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
SEEDS = [[100 * group + number for number in range(4)] for group in range(len(PROMPTS))]
NEAR = 1e-2  # largest difference, in nats, between two engines in float32


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
def groups(engine: VllmEngine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, SEEDS, SAMPLING)


@torch.inference_mode()
def computed(model: Any, prompt: Sequence[int], completion: Completion) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden_TH and logits_TV from which plain torch would sample the completion's tokens."""
    start, sequence = len(prompt) - 1, [*prompt, *completion.tokens]
    output = model(torch.tensor([sequence]), output_hidden_states=True)
    return output.hidden_states[-1][0, start:-1], output.logits[0, start:-1]


def assert_sampled(model: Any, prompt: Sequence[int], seed: int, completion: Completion) -> None:
    """Compare tokens, logprobs and hidden states with plain torch and the seed."""
    hidden_TH, logits_TV = computed(model, prompt, completion)
    sampled = model_positions(completion.turns, len(completion.tokens))
    tokens_N = torch.tensor([completion.tokens[at] for at in sampled])
    margins_N = replay_margins(logits_TV[sampled], tokens_N, [seed] * len(sampled), sampled)
    assert float(margins_N.max()) < NEAR
    logp_N = logits_TV[sampled].log_softmax(-1)[torch.arange(len(sampled)), tokens_N]
    torch.testing.assert_close(torch.tensor(completion.logprobs), logp_N, atol=NEAR, rtol=0)
    torch.testing.assert_close(completion.hidden_TH.float(), hidden_TH[sampled], atol=NEAR, rtol=0.02)
    assert completion.hidden_TH.dtype == torch.bfloat16


def test_tokens_follow_from_seeds_and_come_with_their_logprobs_and_states(
    model: Any, groups: list[list[Completion]]
) -> None:
    for prompt, seeds, group in zip(PROMPTS, SEEDS, groups, strict=True):
        for seed, completion in zip(seeds, group, strict=True):
            assert_sampled(model, prompt, seed, completion)
            assert 1 not in completion.tokens[:-1]
            assert completion.tokens[-1] == 1 or len(completion.tokens) == SAMPLING.max_tokens
    assert len({tuple(completion.tokens) for group in groups for completion in group}) > len(PROMPTS), (
        "the completions of a prompt do not depend on their seeds"
    )


def test_more_requests_than_fit_wait_their_turn(engine: VllmEngine) -> None:
    short = Sampling(1.0, 3, (1,))
    seeds = [list(range(300))]
    together = engine.generate(PROMPTS[:1], seeds, short)[0]
    alone = engine.generate(PROMPTS[:1], [seeds[0][290:292]], short)[0]
    assert [completion.tokens for completion in together[290:292]] == [completion.tokens for completion in alone]


def test_greedy_tokens_equal_those_of_the_torch_engine(engine: VllmEngine, tiny: Path) -> None:
    greedy = Sampling(0.0, 12, (1,))
    torch_engine = TorchEngine("float32")
    torch_engine.load(tiny)
    ours, theirs = (each.generate(PROMPTS, [[0]] * len(PROMPTS), greedy) for each in (torch_engine, engine))
    assert [completion.tokens for [completion] in ours] == [completion.tokens for [completion] in theirs]


def test_a_turn_follows_an_environments_reply(engine: VllmEngine, model: Any) -> None:
    ends = Sampling(1.0, 24, tuple(range(20)))  # with many end tokens, so that turns end early

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return [30, 31] if not turns and len(tokens) < 20 else None

    [group] = engine.generate(PROMPTS[:1], SEEDS[:1], ends, respond)
    assert any(completion.turns for completion in group)
    for seed, completion in zip(SEEDS[0], group, strict=True):
        if completion.turns:
            first, reply = completion.turns
            assert completion.tokens[first : first + reply] == [30, 31]
        assert_sampled(model, PROMPTS[0], seed, completion)


def test_a_long_prompt_is_shared_and_its_completions_are_right(engine: VllmEngine, model: Any) -> None:
    prompt = [5 + at * at % 40 for at in range(300)]  # more than two blocks of vLLM's cache
    for seeds in ([1, 2, 3, 4], [5, 6]):  # the second time, the prompt is cached
        [group] = engine.generate([prompt], [seeds], SAMPLING)
        for seed, completion in zip(seeds, group, strict=True):
            assert_sampled(model, prompt, seed, completion)
