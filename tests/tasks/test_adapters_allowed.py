"""A machine loads no environment of verifiers that its owner has not listed. Without the library: nothing is loaded here."""

import json
import sys
from pathlib import Path

import pytest

from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks import Graders
from shoal.tasks.adapters import verifiers
from shoal.tasks.adapters.library import Library, Scored
from shoal.tasks.task import Task
from shoal.tasks.trust import TRUST

FAR = """
def rows(options):
    yield {"question": "q", "answer": "a", "metadata": "{}"}
def prepare(setting): pass
def score(value): return {"score": 1.0, "outcome": "graded", "detail": ""}
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(verifiers.ENVIRONMENTS, raising=False)
    monkeypatch.delenv(TRUST, raising=False)


def library(folder: Path) -> Library:
    """verifiers' library with another far side, which loads whatever it is asked for."""
    file = folder / "far.py"
    file.write_text(FAR)
    return Library("verifiers", file, "verifiers", sys.executable, check=verifiers.library().check)


def test_only_listed_environments_are_listed_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"generator": "verifiers", "setting": {"environment": "this"}}
    task = Task(id="s/0", question="q", answer="", source="s", metadata=json.dumps(metadata))
    reward = Scored(library(tmp_path))
    try:
        for listed in (None, "", "sums", "sums, thistle"):
            if listed is not None:
                monkeypatch.setenv(verifiers.ENVIRONMENTS, listed)
            with pytest.raises(verifiers.NotAllowedError, match=r"'this'.*SHOAL_VERIFIERS_ENVIRONMENTS=this"):
                library(tmp_path).rows({"environment": "this"})
            with pytest.raises(verifiers.NotAllowedError):
                reward.grade([task], ["x"])
        monkeypatch.setenv(verifiers.ENVIRONMENTS, "sums, this")
        assert len(library(tmp_path).rows({"environment": "this"})) == 1
        assert [grade.score for grade in reward.grade([task], ["x"])] == [1.0]
    finally:
        reward.close()


def test_a_node_says_so_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    section = TaskSection(sources=[SourceSection(generator="verifiers", options={"environment": "this"})])
    with pytest.raises(verifiers.NotAllowedError, match="it allows none"):
        Graders(section)
    monkeypatch.setenv(TRUST, "1")
    Graders(section).close()
