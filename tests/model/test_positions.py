"""Completions that do not fit the model's positions are refused before anything is generated."""

import json
from pathlib import Path

import pytest

from shoal.config import parse
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.model.sources import check_max_tokens, positions
from shoal.protocol.identity import Identity
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

TOO_LONG = {"sampling": {"max_tokens": 512}, "evaluator": {"n": 1}, "tasks": {"heldout": 1}}
MESSAGE = r"sampling\.max_tokens = 512, but the model in .* has 512 positions .* below 512$"


def test_a_prompt_needs_a_position_too(tiny_folder: Path) -> None:
    assert positions(json.loads((tiny_folder / "config.json").read_text())) == 512
    check_max_tokens(tiny_folder, 511)
    with pytest.raises(ShoalError, match=MESSAGE):
        check_max_tokens(tiny_folder, 512)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, None),
        ({"text_config": {"max_position_embeddings": 9}}, 9),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 9}}, 9),
        ({"text_config": None}, None),
        ({"vision": 1}, None),
    ],
)
def test_positions_are_those_of_the_language_model(
    tmp_path: Path, config: dict[str, object], found: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert positions(config) == found
    check_max_tokens(tmp_path, 8)


def test_workers_and_validators_refuse_it_without_loading_the_weights(tiny_folder: Path) -> None:
    config = parse(TOO_LONG)
    producer = Producer(config, "run-0", Identity.generate(), TorchEngine("float32"))
    with pytest.raises(ShoalError, match=MESSAGE):
        producer.load(tiny_folder, 0)
    assert producer.engine.folder is None  # type: ignore[attr-defined]
    with Judge(config, "run-0", "float32") as judge, pytest.raises(ShoalError, match=MESSAGE):
        judge.load(tiny_folder)
    assert judge.model is None
