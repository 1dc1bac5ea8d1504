"""The bundled SmolLM2 is right, not only loadable: a wrong permutation or scale in it fails here."""

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


@pytest.fixture(scope="module")
def perplexities(bundled_model: Any, bundled_tokenizer: Any) -> tuple[float, float]:
    """Of the paragraph, and of the same words in a random order."""
    words = PARAGRAPH.split()
    random.Random(0).shuffle(words)

    def perplexity(text: str) -> float:
        ids = torch.tensor([bundled_tokenizer(text)["input_ids"]])
        assert ids.shape[1] > 100
        return math.exp(float(bundled_model(ids, labels=ids).loss))

    with torch.no_grad():
        return perplexity(PARAGRAPH), perplexity(" ".join(words))


def test_plain_english_is_unsurprising(perplexities: tuple[float, float]) -> None:
    assert 3 < perplexities[0] < 40


def test_the_same_words_shuffled_are_far_more_surprising(perplexities: tuple[float, float]) -> None:
    assert perplexities[1] > 5 * perplexities[0]


@pytest.mark.parametrize(("index", "question"), list(enumerate(QUESTIONS)))
def test_a_trivial_question_is_answered_right(
    answers: list[list[int]], bundled_tokenizer: Any, index: int, question: str
) -> None:
    assert QUESTIONS[question] in bundled_tokenizer.decode(answers[index])


def test_a_short_answer_ends_with_the_end_token(answers: list[list[int]], bundled_tokenizer: Any) -> None:
    assert answers[0][-1] == bundled_tokenizer.eos_token_id


def test_the_chat_template_marks_whose_turn_it_is(chats: list[list[int]], bundled_tokenizer: Any) -> None:
    text = bundled_tokenizer.decode(chats[0])
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def test_digits_are_tokenised_one_by_one(bundled_tokenizer: Any) -> None:
    pieces = [bundled_tokenizer.decode([token]) for token in bundled_tokenizer("2026 + 31415")["input_ids"]]
    assert [piece for piece in pieces if piece.strip().isdigit()] == list("202631415")


def test_text_survives_the_tokenizer(bundled_tokenizer: Any) -> None:
    text = "  Ünïcode, 漢字\n\n\tand `code` <b>"
    assert bundled_tokenizer.decode(bundled_tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("index", [0, 4])
def test_greedy_answers_equal_transformers_own_generate(
    answers: list[list[int]], chats: list[list[int]], bundled_model: Any, index: int
) -> None:
    prompt = torch.tensor([chats[index]])
    theirs = bundled_model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert answers[index] == theirs[0, prompt.shape[1] :].tolist()


def test_the_converted_weights_are_stored_in_bfloat16_with_the_tied_head_once(bundled: Path) -> None:
    tensors = load_file(bundled / WEIGHTS)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
