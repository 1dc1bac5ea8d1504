"""Which folder a model's name means, and what its digest covers."""

from pathlib import Path

import pytest

from shoal.evals.completions import EvalError
from shoal.evals.local import digest, folder_of, label_of
from shoal.model.sources import ModelNotFoundError


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_folder_is_a_model_or_a_run_that_left_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = model(tmp_path / "run" / "model").parent
    assert folder_of(str(run)) == run / "model"
    assert folder_of(str(run / "model")) == run / "model"
    monkeypatch.chdir(tmp_path)
    assert folder_of("run") == Path("run/model")


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="neither config.json nor model/config.json"):
        folder_of(str(tmp_path))
    with pytest.raises(ModelNotFoundError):
        folder_of("./nowhere")


def test_the_digest_covers_weights_and_template_and_not_the_place(tmp_path: Path) -> None:
    one, same = model(tmp_path / "a"), model(tmp_path / "b")
    assert digest(one) == digest(same)
    (same / "model.safetensors").write_bytes(b"weighty")
    assert digest(one) != digest(same)
    before = digest(one)
    (one / "chat_template.jinja").write_text("x")
    assert digest(one) != before
    kept = digest(one)
    (one / "README.md").write_text("x")
    assert digest(one) == kept


def test_labels_are_short_where_that_is_clear() -> None:
    assert label_of("org/name", ["org/name"]) == "name"
    assert label_of("bundled:tiny", ["bundled:tiny"]) == "bundled:tiny"
    assert label_of("runs/a/", ["runs/a/", "runs/b"]) == "a"
    assert label_of("a/model", ["a/model", "b/model"]) == "a/model"
