"""Several turns in one completion: the engine appends what it is given, and samples on from there."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model.turns import model_positions

from .support import naive, with_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 9, 33, 7], [12], [40, 41, 42, 43, 44, 45, 46]]
SEEDS = [[101, 102, 103], [201, 202], [301]]
ENDS = (1, 7, 20, 33, 41, 50)
SAMPLING = Sampling(temperature=1.0, max_tokens=60, eos_ids=ENDS)


def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
    """One to four tokens, end tokens among them, which depend on everything; silent after three answers."""
    assert tokens[-1] in ENDS
    answer = [1, 2 + group, 7, 30 + number][: 1 + (sum(tokens) + group) % 4]
    return answer if len(turns) < 6 and len(tokens) + len(answer) < SAMPLING.max_tokens else None


@pytest.fixture(scope="module")
def groups(engine: TorchEngine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, SEEDS, SAMPLING, respond)


def flat(groups: list[list[Completion]]) -> list[tuple[list[int], Completion]]:
    return with_prompts(PROMPTS, groups)


def by_turns(model: Any, group: int, number: int) -> tuple[list[int], list[int]]:
    """Tokens and turns of one completion: a loop over single turns."""
    tokens: list[int] = []
    turns: list[int] = []
    while True:
        start = len(tokens)
        tokens += naive(model, [*PROMPTS[group], *tokens], SEEDS[group][number], SAMPLING, start)
        answer = respond(group, number, tokens, turns) if tokens[-1] in ENDS else None
        if not answer:
            return tokens, turns
        turns += [len(tokens) - start, len(answer)]
        tokens += answer


def test_turns_equal_a_loop_of_single_turns(engine: TorchEngine, groups: list[list[Completion]]) -> None:
    assert len({len(c.turns) for _, c in flat(groups)}) >= 2 and max(len(c.turns) for _, c in flat(groups)) == 6
    for g, group in enumerate(groups):
        for number, completion in enumerate(group):
            assert (completion.tokens, completion.turns) == by_turns(engine.model, g, number)


@torch.no_grad()
def test_logprobs_and_states_are_those_of_sampled_tokens(engine: TorchEngine, groups: list[list[Completion]]) -> None:
    for prompt, c in flat(groups):
        own = torch.tensor(model_positions(c.turns, len(c.tokens)))
        output = engine.model(torch.tensor([[*prompt, *c.tokens]]), output_hidden_states=True)
        before = own + len(prompt) - 1
        logp_N = output.logits[0, before].float().log_softmax(-1).gather(-1, torch.tensor(c.tokens)[own][:, None])
        torch.testing.assert_close(torch.tensor(c.logprobs), logp_N[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(
            c.hidden_TH.float(), output.hidden_states[-1][0, before].bfloat16().float(), atol=0.05, rtol=0.02
        )
        assert c.hidden_TH.shape[0] == len(c.logprobs) == len(own)


def test_where_nothing_is_answered_everything_is_as_without_an_environment(engine: TorchEngine) -> None:
    silent = engine.generate(PROMPTS, SEEDS, SAMPLING, lambda *_: None)
    single = engine.generate(PROMPTS, SEEDS, SAMPLING)
    for one, other in zip(flat(silent), flat(single), strict=True):
        assert (one[1].tokens, one[1].logprobs, one[1].turns) == (other[1].tokens, other[1].logprobs, [])
        assert torch.equal(one[1].hidden_TH, other[1].hidden_TH)


def test_an_answer_that_leaves_one_token_is_followed_by_it_and_a_longer_one_is_refused(engine: TorchEngine) -> None:
    groups = engine.generate(PROMPTS, SEEDS, SAMPLING, lambda g, n, tokens, turns: [4] * (59 - len(tokens)))
    answered = [c for _, c in flat(groups) if c.turns]
    assert answered and all(len(c.tokens) == 60 and sum(c.turns) == 59 for c in answered)
    with pytest.raises(ValueError, match="leave no room below 60"):
        engine.generate(PROMPTS, SEEDS, SAMPLING, lambda g, n, tokens, turns: [4] * (60 - len(tokens)))
