"""vLLM's second model runner, with its kernels interpreted: Shoal's draw, and vLLM's own that Shoal computes again. Slow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.adversary.cheats import WrongTemperature

from shoal.cli.calibrate import RUN
from shoal.config import load
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.model.load import load_model
from shoal.model.sampling import NOISES, NoiseName, replay_margins
from shoal.model.sources import resolve
from shoal.protocol.messages import Reason
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

from ...workers import ALICE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

INTERPRETED = Path(__file__).with_name("interpreted.py")
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
SEEDS = [[2**62 + 100 * group + number for number in range(4)] for group in range(len(PROMPTS))]
NEAR = 1e-2  # nats between two engines in float32
BOTH = pytest.mark.parametrize("noise", ["shoal", "vllm"])


@pytest.fixture(scope="module")
def engine(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    python = tmp_path_factory.mktemp("interpreted") / "python"
    python.write_text(f'#!/bin/sh\nexec "{vllm_python}" -P "{INTERPRETED}" "$@"\n')
    python.chmod(0o700)
    engine = VllmEngine("float32", 1, str(python))
    engine.load(resolve("bundled:tiny"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(resolve("bundled:tiny"))


@torch.inference_mode()
def farthest(
    model: Any, prompt: Sequence[int], seed: int, one: Completion, noise: NoiseName, temperature: float = 1.0
) -> float:
    """The largest margin of the tokens that the model wrote; states and logprobs are compared on the way."""
    output = model(torch.tensor([[*prompt, *one.tokens]]), output_hidden_states=True)
    start, given = one.turns[:1] or [0], sum(one.turns)
    own = [*range(start[0]), *range(given, len(one.tokens))]
    places = [len(prompt) - 1 + at for at in own]
    scaled_TV, tokens_T = output.logits[0, places] / temperature, torch.tensor([one.tokens[at] for at in own])
    torch.testing.assert_close(one.hidden_TH.float(), output.hidden_states[-1][0, places], atol=NEAR, rtol=0.02)
    logp_T = scaled_TV.log_softmax(-1).gather(-1, tokens_T[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(one.logprobs), logp_T, atol=NEAR, rtol=0)
    scheme = NOISES[noise]
    positions = [scheme.position(len(prompt), at) for at in own]
    return float(replay_margins(scaled_TV, tokens_T, [seed] * len(own), positions, scheme).max())


@BOTH
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_token_is_the_one_that_its_seed_yields(
    engine: VllmEngine, model: Any, noise: NoiseName, temperature: float
) -> None:
    groups = engine.generate(PROMPTS, SEEDS, Sampling(temperature, 16, (1,), noise))
    other: NoiseName = "vllm" if noise == "shoal" else "shoal"
    missed = 0
    for prompt, seeds, group in zip(PROMPTS, SEEDS, groups, strict=True):
        for seed, one in zip(seeds, group, strict=True):
            assert farthest(model, prompt, seed, one, noise, temperature) < NEAR
            missed += farthest(model, prompt, seed, one, other, temperature) > 1
    assert missed > len(PROMPTS), "the other noise yields other tokens"


@BOTH
def test_the_tokens_are_the_torch_engines(engine: VllmEngine, noise: NoiseName) -> None:
    torch_engine = TorchEngine("float32")
    torch_engine.load(resolve("bundled:tiny"))
    for sampling in (Sampling(1.0, 8, (1,), noise), Sampling(0.0, 8, (1,), noise)):
        ours, theirs = (each.generate(PROMPTS, SEEDS, sampling) for each in (torch_engine, engine))
        assert [[one.tokens for one in group] for group in ours] == [[one.tokens for one in group] for group in theirs]


@BOTH
def test_a_turn_goes_on_after_an_environments_answer(engine: VllmEngine, model: Any, noise: NoiseName) -> None:
    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        return [30, 31] if not turns and len(tokens) < 20 else None

    ends = Sampling(1.0, 24, tuple(range(20)), noise)  # many end tokens
    [group] = engine.generate(PROMPTS[:1], SEEDS[:1], ends, respond)
    assert any(one.turns for one in group)
    for seed, one in zip(SEEDS[0], group, strict=True):
        assert farthest(model, PROMPTS[0], seed, one, noise) < NEAR


@BOTH
def test_prompts_that_are_computed_in_parts_and_slots_that_are_used_again(
    engine: VllmEngine, model: Any, noise: NoiseName
) -> None:
    """More tokens than fit a step, and more requests than fit the batch."""
    long = [[5 + (at * at + number) % 40 for at in range(800)] for number in range(6)]
    prompts, seeds = [*long, *PROMPTS], [*([number, number + 1] for number in range(6)), range(300), *SEEDS[1:]]
    groups = engine.generate(prompts, seeds, Sampling(1.0, 3, (1,), noise))
    checked = [(0, 0), (5, 1), (6, 0), (6, 299), (8, 3)]
    for group, number in checked:
        assert farthest(model, prompts[group], seeds[group][number], groups[group][number], noise) < NEAR


@pytest.mark.parametrize(("kind", "reason"), [(Producer, None), (WrongTemperature, Reason.SAMPLING)])
def test_a_validator_accepts_what_vllm_drew_by_itself_and_no_other_temperature(
    engine: VllmEngine, kind: type[Producer], reason: Reason | None
) -> None:
    settings = ["workers.groups_per_submission=4", 'sampling.noise="vllm"']
    config = load(Path(__file__).parents[3] / "configs" / "tiny.toml", settings)
    worker, asked = kind(config, RUN, ALICE, engine, kind="vllm/cpu"), offline_assignment(config, ALICE.public, 0)
    worker.load(resolve(config.model.name), 0)
    with Judge(config, RUN, "float32") as judge:
        judge.load(resolve(config.model.name))
        case = judge.open(asked, ALICE.public, worker.submission(asked))
        assert isinstance(case, Case), case
        [examined] = judge.examine([case])
    worker.close()
    assert (examined.finding and examined.finding.reason) is reason, examined.finding
