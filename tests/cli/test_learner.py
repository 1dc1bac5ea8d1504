"""The learner refuses what its config asks for and its model cannot do, before it publishes anything."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli import roles as role
from shoal.config import parse
from shoal.model import numerics
from shoal.model.load import load_model
from shoal.model.numerics import NumericsError

from ..conftest import tiny_tokenizer
from ..model import architectures


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is computed one sequence a row."""
    folder = architectures.made(tmp_path_factory.mktemp("windowed"), "mistral")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def started(model: Path, folder: Path, wanted: str, monkeypatch: pytest.MonkeyPatch, **learner: Any) -> str:
    @contextmanager
    def leading(*_: Any) -> Iterator[Any]:
        config = {"model": {"name": str(model), "numerics": wanted}, "run": {"steps": 1}, "learner": learner}
        yield None, parse(config), "float32"

    monkeypatch.setattr(role, "_leading", leading)
    monkeypatch.setattr(numerics, "refusal", lambda *_: None)  # this machine can
    monkeypatch.setattr("shoal.learner.loop.Learner", lambda *_: SimpleNamespace(run=lambda _: "finished"))
    return role.run_learner(None, folder, 1, threading.Event())  # type: ignore[arg-type]


def test_exact_numerics_asked_for_by_name_are_never_fast(
    windowed: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numerics.of(load_model(windowed, "float32", numerics="exact")) == "fast"
    with pytest.raises(
        NumericsError, match=r'numerics = "exact" cannot be had: Mistral\w* is computed one .*"auto" or'
    ):
        started(windowed, tmp_path, "exact", monkeypatch)
    with pytest.raises(NumericsError, match="learner.compile = true"):
        started(tiny_folder, tmp_path, "exact", monkeypatch, compile=True)
    for model, wanted in ((windowed, "auto"), (windowed, "fast"), (tiny_folder, "exact")):
        assert started(model, tmp_path, wanted, monkeypatch) == "finished"
