"""`prepare` checks device, model and tasks before a run starts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shoal import config as config_module
from shoal.cli.launch.prepare import prepare
from shoal.cli.main import FAILED, main
from shoal.config import Config
from shoal.errors import UserError, restart_helps
from shoal.model.dtype import DeviceError
from shoal.tasks.prompt import ChatTemplateError

CONFIGS = Path(__file__).parents[3] / "configs"


def tiny(*overrides: str) -> Config:
    return config_module.load(CONFIGS / "tiny.toml", list(overrides))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_missing_device_is_named(device: str) -> None:
    with pytest.raises(DeviceError, match=f'^device "{device}" cannot be used here') as caught:
        prepare(tiny(f"model.device={device}"))
    assert not restart_helps(caught.value)


def test_a_model_without_a_chat_template_is_named(tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match=f"{folder} has no chat template") as caught:
        prepare(tiny(f"model.name={folder}"))
    assert not restart_helps(caught.value)


def test_a_chat_template_that_allows_no_environment_is_named(tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(
        ChatTemplateError, match=r"does not write every message once: .* remove the source's environment"
    ):
        prepare(tiny(f"model.name={folder}", "tasks.sources.0.environment=calculator"))


def test_the_parameters_are_those_of_the_weights(tiny_folder: Path) -> None:
    prepared = prepare(tiny(f"model.name={tiny_folder}"))
    weights = load_file(tiny_folder / "model.safetensors")
    assert prepared["parameters"] == sum(tensor.numel() for tensor in weights.values())


def rewritten(config: str, **fields: object) -> Callable[[Path], object]:
    return lambda folder: (folder / config).write_text(json.dumps(json.loads((folder / config).read_text()) | fields))


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_weights, "has no weights; it needs files"),
        (truncated, r"model.safetensors is damaged \(.*\); copy or download it again"),
        (rewritten("config.json", sliding_window=64), "limits or changes attention over long sequences"),
        (
            rewritten("config.json", max_position_embeddings=10),
            r"a prompt of \d+ tokens and a completion of up to 6 do",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_on_the_tasks_is_named_before_the_run(
    spoil: Callable[[Path], object], message: str, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    with pytest.raises(UserError, match=message):
        prepare(tiny(f"model.name={folder}"))
    assert main(["check", "tiny", "--set", f"model.name={folder}"]) == FAILED
    assert re.search(message, capsys.readouterr().out)
