"""`shoal sft` at a shell: it prints the model's folder, or one line with the error."""

import json
import threading
from pathlib import Path

import pytest

from shoal.cli.main import DONE, FAILED, USAGE, main
from shoal.config import load
from shoal.model.load import load_model

from .support import replace_begin

pytestmark = pytest.mark.usefixtures("one_thread")
SHIPPED = Path(__file__).parents[2] / "configs" / "sft.toml"


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return the event that a signal would set, without changing this process's signals and log."""
    return replace_begin(monkeypatch)


@pytest.fixture
def small(tiny_folder: Path, tmp_path: Path) -> str:
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) + "\n" for i in range(9)))
    path = tmp_path / "small.toml"
    path.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n"
        f"[sft]\ndata = {json.dumps(str(data))}\nbatch = 4\nmax_tokens = 64\n"
    )
    return str(path)


def test_sft_prints_the_folder_of_a_model_that_loads(
    small: str, stop: threading.Event, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", small, "--set", "sft.epochs=2", "--out", str(tmp_path / "out")]) == DONE
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'model'}\n"
    load_model(tmp_path / "out" / "model")
    assert (tmp_path / "out" / "checkpoints" / "step-000004").is_dir()


def test_the_error_of_a_stopped_training_tells_how_to_resume(
    small: str, stop: threading.Event, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop.set()
    out = str(tmp_path / "out")
    assert main(["sft", small, "--out", out]) == FAILED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(f"stopped before the end of the last epoch; add --out {out} to resume\n")
    assert main(["sft", small, "--set", "sft.checkpoint_every=0", "--out", out]) == FAILED
    assert "no checkpoint was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "status", "words"),
    [
        ("sft.data=nowhere.jsonl", USAGE, "no file at"),
        ("sft.data=", USAGE, "sft.data is empty"),
        ("sft.bach=3", USAGE, "did you mean 'sft.batch'?"),
    ],
)
def test_a_failure_is_reported_in_one_line(
    small: str,
    stop: threading.Event,
    tmp_path: Path,
    override: str,
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sft", small, "--set", override, "--out", str(tmp_path / "out")]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("shoal sft: ") and words in last


def test_sft_without_a_config_makes_the_tiny_model_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trained: list[object] = []
    monkeypatch.setattr("shoal.learner.sft.tiny.bundled_dir", lambda name: tmp_path / "tiny")
    monkeypatch.setattr("shoal.learner.sft.tiny.train", lambda *_, **__: trained.append(1))
    assert main(["sft"]) == main(["sft"]) == DONE
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}\n" * 2 and trained == [1]


def test_the_shipped_config_loads_and_its_data_exists() -> None:
    assert (SHIPPED.parent.parent / load(SHIPPED).sft.data).is_file()
