"""Faults of a config that are found before anything is started, each reported in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from shoal.cli.launch.prepare import check_length, check_packages, load_tasks
from shoal.cli.main import FAILED, main
from shoal.config import Config, ConfigError, load, parse
from shoal.coordinator.folder import open_state, open_tables
from shoal.errors import UserError
from shoal.model.sources import BUNDLED_POSITIONS, SMOLLM2, read_config, resolve

CONFIGS = Path(__file__).parents[3] / "configs"
FITTING: dict[str, Any] = {"sampling": {"max_tokens": 64}}


def check(**sections: Any) -> None:
    check_length(parse(FITTING | sections), fetch=True)


def model(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "config",
    [{"max_position_embeddings": 64}, {"text_config": {"max_position_embeddings": 64}}],
    ids=["plain", "nested"],
)
def test_completions_longer_than_the_models_positions_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    name = model(tmp_path / "model", **config)
    with pytest.raises(ConfigError, match="sampling.max_tokens = 64 does not fit .* its 64 positions"):
        check(model={"name": name})
    check(model={"name": name}, sampling={"max_tokens": 63})  # a prompt of one token fits


def test_a_model_without_a_limit_of_positions_is_not_checked(tmp_path: Path) -> None:
    check(model={"name": model(tmp_path / "model")})


def test_the_default_recipe_is_refused_for_the_bundled_model() -> None:
    with pytest.raises(
        ConfigError, match="sampling.max_tokens = 32768 does not fit bundled:smollm2.* its 8192 positions"
    ):
        check_length(Config())


def test_the_bundled_model_has_the_expected_positions(bundled: Path) -> None:
    assert read_config(SMOLLM2, fetch=False)["max_position_embeddings"] == BUNDLED_POSITIONS[SMOLLM2]


@pytest.mark.parametrize("name", list(BUNDLED_POSITIONS))
def test_the_positions_of_a_bundled_model_are_known_before_it_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert read_config(name, fetch=False) == {"max_position_embeddings": BUNDLED_POSITIONS[name]}
    assert list(tmp_path.iterdir()) == []


def test_a_hub_model_is_fetched_only_by_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    check_length(parse({"model": {"name": "org/nowhere"}}))
    with pytest.raises(UserError, match="^model 'org/nowhere' was not found.*$"):
        check(model={"name": "org/nowhere"})


@pytest.mark.parametrize(
    ("setting", "package", "extra"),
    [
        ("coordinator.database=postgresql://db/shoal", "psycopg", "postgres"),
        ("store.url=s3://bucket/run", "obstore", "s3"),
        (f"ledger.contract=0x{'5' * 40}", "web3", "evm"),
        ("run.tracker=wandb", "wandb", "wandb"),
    ],
)
def test_a_setting_whose_package_is_not_installed_is_named(
    setting: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_packages(parse(FITTING))
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    message = (
        rf"^{setting.partition('=')[0]}.* needs {package}, which is not installed; pip install 'shoal\[{extra}\]'$"
    )
    config = load(CONFIGS / "tiny.toml", [setting])
    with pytest.raises(UserError, match=message):
        check_packages(config)
    assert main(["check", str(CONFIGS / "tiny.toml"), "--set", setting]) == FAILED
    assert f"needs {package}, which is not installed" in capsys.readouterr().out


def test_a_database_without_its_package_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    (tmp_path / "config.toml").write_text('[coordinator]\ndatabase = "postgresql://db/shoal"\n')
    for use in (open_tables, lambda folder: open_state(folder, load(folder / "config.toml").coordinator)):
        with pytest.raises(UserError, match=r"^coordinator.database needs psycopg, which is not installed"):
            use(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "nowhere.jsonl"}, "no file or folder at .*nowhere.jsonl"),
        ({"generator": "arithmetic", "reward": "maths"}, "source arithmetic: no reward 'maths'; there are number"),
    ],
)
def test_tasks_that_cannot_be_read_or_graded_are_named(source: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tasks(parse(FITTING | {"tasks": {"sources": [source]}}))


def test_loading_tasks_reports_how_many_there_are() -> None:
    assert load_tasks(parse(FITTING)).notes[0] == "arithmetic: 644 tasks to train on, 256 held out"


def test_a_model_in_a_folder_is_checked(tiny_folder: Path) -> None:
    assert resolve(str(tiny_folder)) == tiny_folder
    with pytest.raises(ConfigError, match="its 512 positions"):
        check(model={"name": str(tiny_folder)}, sampling={"max_tokens": 512})
