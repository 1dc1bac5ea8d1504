"""The converted SmolLM2 writes sensible English. With wrongly permuted or scaled weights it would not."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model.load import WEIGHTS, eos_ids

pytestmark = pytest.mark.usefixtures("one_thread")

PARAGRAPH = (
    "The old lighthouse stood at the end of a narrow road, a mile from the nearest village. Every "
    "evening the keeper climbed the stairs to light the lamp, and every morning he came down again to "
    "sleep. In winter the storms were so strong that the windows shook and the waves broke over the "
    "rocks below. Ships passing along the coast could see the light from many miles away, and the "
    "sailors knew that they were close to home. When the keeper grew too old to climb the stairs, his "
    "daughter took over the work, and she kept the lamp burning for another thirty years."
)
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is 2+2?": "4",
    "What is the opposite of hot?": "cold",
    "How many days are in a week?": "7",
    "What is the first month of the year?": "January",
}


@pytest.fixture(scope="module")
def engine(bundled_model: Any) -> TorchEngine:
    engine = TorchEngine("float32")
    engine.model = bundled_model
    return engine


@pytest.fixture(scope="module")
def chats(bundled_tokenizer: Any) -> list[list[int]]:
    return [
        bundled_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def answers(engine: TorchEngine, chats: list[list[int]], bundled: Path) -> list[list[int]]:
    sampling = Sampling(temperature=0.0, max_tokens=12, eos_ids=eos_ids(bundled))
    return [group[0].tokens for group in engine.generate(chats, [[0]] * len(chats), sampling)]


@torch.no_grad()
def test_perplexity_is_low_for_plain_english_and_high_for_shuffled_words(
    bundled_model: Any, bundled_tokenizer: Any
) -> None:
    words = PARAGRAPH.split()
    random.Random(0).shuffle(words)
    perplexities = []
    for text in (PARAGRAPH, " ".join(words)):
        ids = torch.tensor([bundled_tokenizer(text)["input_ids"]])
        perplexities.append(math.exp(float(bundled_model(ids, labels=ids).loss)))
    assert 3 < perplexities[0] < 40 and perplexities[1] > 5 * perplexities[0]


@pytest.mark.parametrize(("index", "question"), list(enumerate(QUESTIONS)))
def test_trivial_questions_are_answered_correctly(
    answers: list[list[int]], bundled_tokenizer: Any, index: int, question: str
) -> None:
    assert QUESTIONS[question] in bundled_tokenizer.decode(answers[index])
    assert index or answers[index][-1] == bundled_tokenizer.eos_token_id, "a short answer must end with EOS"


def test_the_converted_weights_are_stored_in_bfloat16_and_the_tied_head_once(bundled: Path) -> None:
    tensors = load_file(bundled / WEIGHTS)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
