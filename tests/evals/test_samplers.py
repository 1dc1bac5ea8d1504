"""The engine as a sampler: prompts, seeds, and batches that stay the same after a restart. No model is loaded."""

from pathlib import Path
from typing import Any

import pytest

from shoal.evals import samplers
from shoal.evals.completions import Answer, Asked, EvalError, Key
from shoal.evals.evaluate import asked_of
from shoal.evals.samplers import EngineSampler, Sampling
from tests.evals.support import END, FakeEngine, entry


class Tokenizer:
    """One token per character."""

    name_or_path = "fake"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in messages[0]["content"]]}

    def decode(self, tokens: list[int], **_: object) -> str:
        return " ".join(str(token) for token in tokens if token != END)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 32}')
    monkeypatch.setattr("shoal.model.load.load_tokenizer", lambda folder: Tokenizer())
    monkeypatch.setattr("shoal.model.load.eos_ids", lambda folder: (END,))
    return tmp_path


def answers(folder: Path, asked: list[Asked], known: set[Key], batch: int = 4) -> tuple[dict[Key, Answer], FakeEngine]:
    engine: Any = FakeEngine()
    found: dict[Key, Answer] = {}
    sampler = EngineSampler(engine, folder, batch)
    sampler.answer(asked, Sampling(1.0, 8), known, lambda many: found.update((one.key, answer) for one, answer in many))
    return found, engine


def test_each_completion_has_its_own_seed_whatever_the_batch(model: Path) -> None:
    asked = asked_of(entry(5, 3), 0)
    assert len({one.seed for one in asked}) == 15
    by_four, engine = answers(model, asked, set(), 4)
    by_six, _ = answers(model, asked, set(), 6)
    assert by_four == by_six
    assert len(by_four) == 15
    assert list(map(len, engine.batches)) == [4, 4, 4, 3]
    assert {one.seed for one in asked} == {seed for batch in engine.batches for seed in batch}
    assert asked_of(entry(5, 3), 1)[0].seed != asked[0].seed


def test_after_a_restart_batches_are_those_of_an_uninterrupted_evaluation(model: Path) -> None:
    """Rows of a batch differ by rounding from rows computed in another batch."""
    asked = asked_of(entry(5, 3), 0)
    _, whole = answers(model, asked, set())
    known = {one.key for one in asked[:6]}  # one batch and a half
    found, rest = answers(model, asked, known)
    assert rest.batches == whole.batches[1:]
    assert set(found) == {one.key for one in asked[4:]}


def test_what_the_engine_made_is_read(model: Path) -> None:
    asked = asked_of(entry(5, 3), 0)
    found, engine = answers(model, asked, set())
    assert engine.settings[0].temperature == 1.0
    assert engine.settings[0].max_tokens == 8
    for one in asked:
        assert found[one.key].ended == bool(one.seed % 2)
        assert found[one.key].tokens == (one.seed % 8 + 1 if one.seed % 2 else max(one.seed % 8, 1))


def test_the_prompt_is_that_of_training(model: Path) -> None:
    assert samplers.prompt_of(Tokenizer(), "Q: 1") == [ord(character) for character in "Q: 1"]


def test_completions_that_do_not_fit_are_refused_before_anything_is_computed(model: Path) -> None:
    engine: Any = FakeEngine()
    with pytest.raises(EvalError, match="--max-tokens 28"):
        EngineSampler(engine, model, 4).answer(asked_of(entry(1), 0), Sampling(1.0, 29), set(), lambda many: None)
    assert engine.batches == []
    EngineSampler(engine, model, 4).answer(asked_of(entry(1), 0), Sampling(1.0, 28), set(), lambda many: None)
    assert len(engine.batches) == 1
